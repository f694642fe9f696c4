//! Lists of a server, without the keys that no address can name: the library refuses the whole list for one of them.
//!
//! Keys that end in a slash and have no bytes mark empty folders for some tools. Other keys with an empty part, or with
//! `.` or `..`, are reported once and skipped.

use std::collections::BTreeSet;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};

use contract::note;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpRequest, HttpResponse, HttpService, ReqwestConnector,
};
use store::location::SCHEME;

/// Makes clients that drop such keys from lists.
#[derive(Clone, Debug)]
pub(super) struct Connector {
    bucket: String,
    told: Arc<Mutex<BTreeSet<String>>>,
}

impl Connector {
    /// Those of a bucket.
    pub(super) fn of(bucket: &str) -> Self {
        Connector { bucket: bucket.to_owned(), told: Arc::default() }
    }

    /// Reports a skipped key.
    fn tell(&self, key: &str) {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if told.insert(key.to_owned()) {
            let bucket = &self.bucket;
            note!(
                "note: {SCHEME}{bucket}/{key}: this object is passed by, because no address names it: give it a name \
                 without an empty part, `.`, `..` and control characters"
            );
        }
    }
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let inner = ReqwestConnector::default().connect(options)?;
        Ok(HttpClient::new(Lists { inner, of: self.clone() }))
    }
}

#[derive(Debug)]
struct Lists {
    inner: HttpClient,
    of: Connector,
}

impl HttpService for Lists {
    fn call<'a, 'b>(
        &'a self,
        request: HttpRequest,
    ) -> Pin<Box<dyn Future<Output = Result<HttpResponse, HttpError>> + Send + 'b>>
    where
        'a: 'b,
        Self: 'b,
    {
        Box::pin(async move {
            let query = request.uri().query().unwrap_or_default();
            let lists = query.split('&').any(|part| part == "list-type=2");
            let answer = self.inner.execute(request).await?;
            if !lists || !answer.status().is_success() {
                return Ok(answer);
            }
            let (head, body) = answer.into_parts();
            let body = body.bytes().await?;
            let kept =
                std::str::from_utf8(&body).map(|text| readable(text, |key| self.of.tell(key)));
            let body = kept.map_or(body.clone(), Into::into);
            Ok(HttpResponse::from_parts(head, body.into()))
        })
    }
}

/// A list without the keys that no address can name, each reported through `tell` unless it marks a folder.
fn readable(list: &str, mut tell: impl FnMut(&str)) -> String {
    const END: &str = "</Contents>";
    let mut kept = String::with_capacity(list.len());
    for piece in list.split_inclusive(END) {
        let (before, entry) = piece.split_at(piece.find("<Contents>").unwrap_or(piece.len()));
        kept += before;
        let inner = |name: &str| {
            let (_, rest) = entry.split_once(&format!("<{name}>"))?;
            Some(rest.split_once("</")?.0)
        };
        match inner("Key") {
            Some(key) if !is_named(key) => {
                if !(key.ends_with('/') && inner("Size") == Some("0")) {
                    tell(key);
                }
            }
            _ => kept += entry,
        }
    }
    kept
}

/// Whether an address can name a key, given as it stands in XML.
fn is_named(key: &str) -> bool {
    let is_control = |code: &str| {
        let code = code.split(';').next().unwrap_or_default();
        let number = match code.strip_prefix('x') {
            Some(digits) => u32::from_str_radix(digits, 16),
            None => code.parse(),
        };
        number.is_ok_and(|number| char::from_u32(number).is_none_or(char::is_control))
    };
    let plain = |part: &str| !matches!(part, "" | "." | "..");
    key.split('/').all(plain)
        && !key.chars().any(char::is_control)
        && !key.split("&#").skip(1).any(is_control)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_address_names_is_passed_by_and_told() {
        let entry = |key: &str, size: u64| {
            format!("<Contents><Key>{key}</Key><Size>{size}</Size><ETag>x</ETag></Contents>")
        };
        let list = |entries: &[String]| {
            format!("<List><Prefix>a//</Prefix>{}<IsTruncated/></List>", entries.concat())
        };
        let fine = ["a/b", "a/b c", "a/.b", "a/b&amp;c", "a/&#39;b"].map(|key| entry(key, 0));
        let odd = ["/a", "a//b", "a/./b", "a/..", "a/b&#1;", "a/&#xA;", "a/b/"];
        let mut all: Vec<_> = fine.to_vec();
        all.extend(odd.map(|key| entry(key, 7)));
        all.insert(2, entry("a/mark/", 0));
        let mut told = Vec::new();
        let kept = readable(&list(&all), |key| told.push(key.to_owned()));
        assert_eq!(kept, list(&fine));
        assert_eq!(told, odd);
        for whole in [list(&fine), String::new(), "<Error/>".to_owned()] {
            assert_eq!(readable(&whole, |key| panic!("{key}")), whole);
        }
    }
}
