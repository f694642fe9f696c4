//! Serves the live page on loopback; it polls for updates.
//!
//! ```text
//! GET /                          the page, with everything so far
//! GET /data?known=N&version=V    updates for a page that has N steps; 204 if there are none, 205 if the run was
//!                                replaced by another, so that the page reloads
//! GET /metrics                   the newest values in OpenMetrics text, for Prometheus
//! ```
//!
//! Only users of this machine get an answer: the socket listens on 127.0.0.1, and a request whose `Host` is not this
//! machine is refused, since any web page in a browser here could otherwise send requests under its own name (DNS
//! rebinding).

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::slice;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use contract::{Fault, Result};

use super::open_metrics;
use super::page::{page, payload};
use super::view::RunView;

/// The maximum size of a request in bytes.
const REQUEST: u64 = 16 << 10;

/// The maximum number of simultaneous requests.
const AT_ONCE: usize = 16;

/// The timeout of a client.
const PATIENCE: Duration = Duration::from_secs(10);

/// The server of a run's page.
pub struct PageServer {
    listener: TcpListener,
    view: Mutex<RunView>,
}

/// An HTTP response.
struct HttpResponse {
    status: &'static str,
    kind: &'static str,
    body: String,
}

impl PageServer {
    /// Opens the run at `root` and listens on `port` of this machine; 0 takes a free one.
    pub fn open(root: &Path, port: u16) -> Result<PageServer> {
        let view = Mutex::new(RunView::open(root)?);
        let refused = |error: std::io::Error| {
            Fault::machine(format!("cannot listen: {error}"))
                .at(format!("127.0.0.1:{port}"))
                .hint("name another port with --port; 0 takes a free one")
        };
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).map_err(refused)?;
        listener.set_nonblocking(true).map_err(refused)?;
        Ok(PageServer { listener, view })
    }

    /// The address it listens on.
    pub fn address(&self) -> Result<SocketAddr> {
        let address = self.listener.local_addr();
        address.map_err(|error| Fault::machine(format!("the socket has no address: {error}")))
    }

    /// Serves until `stop` is set.
    pub fn serve(&self, stop: &AtomicBool) -> Result<()> {
        let port = self.address()?.port();
        let busy = AtomicUsize::new(0);
        thread::scope(|scope| {
            while !stop.load(Ordering::Relaxed) {
                match self.listener.accept() {
                    Ok((stream, _)) if busy.load(Ordering::Relaxed) < AT_ONCE => {
                        busy.fetch_add(1, Ordering::Relaxed);
                        let busy = &busy;
                        let answer = move || {
                            // A client that disconnected is not an error.
                            let _ = self.answer(stream, port);
                            busy.fetch_sub(1, Ordering::Relaxed);
                        };
                        if thread::Builder::new().spawn_scoped(scope, answer).is_err() {
                            busy.fetch_sub(1, Ordering::Relaxed);
                        }
                    }
                    Ok(_) => (),
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {
                        thread::sleep(Duration::from_millis(20));
                    }
                    Err(_) => thread::sleep(Duration::from_millis(200)),
                }
            }
        });
        Ok(())
    }

    fn answer(&self, mut stream: TcpStream, port: u16) -> std::io::Result<()> {
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut head = Vec::new();
        let mut reader = BufReader::new((&stream).take(REQUEST));
        while !head.ends_with(b"\r\n\r\n") {
            if reader.read_until(b'\n', &mut head)? == 0 {
                return Ok(());
            }
        }
        let HttpResponse { status, kind, body } = self.route(&String::from_utf8_lossy(&head), port);
        write!(
            stream,
            "HTTP/1.1 {status}\r\nContent-Type: {kind}; charset=utf-8\r\nContent-Length: {}\r\nCache-Control: no-store\r\n\
             X-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n",
            body.len()
        )?;
        stream.write_all(body.as_bytes())
    }

    fn route(&self, head: &str, port: u16) -> HttpResponse {
        let refused = |status, why: &str| HttpResponse {
            status,
            kind: "text/plain",
            body: format!("{why}\n"),
        };
        if !is_ours(head, port) {
            return refused(
                "403 Forbidden",
                "this page is for this machine alone: open it as 127.0.0.1",
            );
        }
        let mut words = head.split_ascii_whitespace();
        let (Some("GET"), Some(target)) = (words.next(), words.next()) else {
            return refused("405 Method Not Allowed", "only GET is answered");
        };
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let answer = match path {
            "/" => self.whole(),
            "/data" => self.news(query),
            "/metrics" => self.metrics(),
            _ => return refused("404 Not Found", "there are /, /data and /metrics"),
        };
        answer.unwrap_or_else(|fault| refused("500 Internal Server Error", &fault.to_string()))
    }

    fn whole(&self) -> Result<HttpResponse> {
        let mut view = self.view.lock().unwrap_or_else(PoisonError::into_inner);
        view.follow()?;
        let body = page(slice::from_ref(&*view), true)?;
        Ok(HttpResponse { status: "200 OK", kind: "text/html", body })
    }

    fn metrics(&self) -> Result<HttpResponse> {
        let mut view = self.view.lock().unwrap_or_else(PoisonError::into_inner);
        view.follow()?;
        Ok(HttpResponse { status: "200 OK", kind: open_metrics::KIND, body: view.open_metrics() })
    }

    fn news(&self, query: &str) -> Result<HttpResponse> {
        let field = |name: &str| {
            let fields = query.split('&').filter_map(|field| field.split_once('='));
            fields.into_iter().find(|(key, _)| *key == name).map_or("", |(_, value)| value)
        };
        let mut view = self.view.lock().unwrap_or_else(PoisonError::into_inner);
        view.follow()?;
        let (known, now) = (field("version"), view.version());
        let run = |version: &str| version.split('-').next().map(str::to_owned);
        let nothing =
            |status| HttpResponse { status, kind: "application/json", body: String::new() };
        if known == now {
            return Ok(nothing("204 No Content"));
        }
        if !known.is_empty() && run(known) != run(&now) {
            return Ok(nothing("205 Reset Content"));
        }
        let known = field("known").parse().unwrap_or(0);
        Ok(HttpResponse {
            status: "200 OK",
            kind: "application/json",
            body: payload(&view, known)?,
        })
    }
}

/// Whether the `Host` of a request is one of this machine's own names.
fn is_ours(head: &str, port: u16) -> bool {
    let hosts: Vec<&str> = head
        .lines()
        .filter_map(|line| line.split_once(':'))
        .filter(|(name, _)| name.eq_ignore_ascii_case("host"))
        .map(|(_, host)| host.trim())
        .collect();
    let [host] = hosts[..] else { return false };
    ["127.0.0.1", "localhost"]
        .iter()
        .any(|name| host.eq_ignore_ascii_case(&format!("{name}:{port}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_this_machines_own_names_are_answered() {
        let head = |hosts: &[&str]| {
            let hosts: String = hosts.iter().map(|host| format!("{host}\r\n")).collect();
            format!("GET / HTTP/1.1\r\n{hosts}\r\n")
        };
        for host in ["Host: 127.0.0.1:80", "host: LOCALHOST:80"] {
            assert!(is_ours(&head(&[host]), 80), "{host}");
        }
        let others = [
            "Host: evil.example:80",
            "Host: 127.0.0.1.evil.example:80",
            "Host: 127.0.0.1:81",
            "Host: 127.0.0.1",
            "Host:",
        ];
        for host in others {
            assert!(!is_ours(&head(&[host]), 80), "{host}");
        }
        assert!(!is_ours(&head(&[]), 80));
        assert!(!is_ours(&head(&["Host: localhost:80", "Host: evil.example:80"]), 80));
    }
}
