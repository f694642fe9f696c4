//! What identities are hashed with: SHA-256 over typed, framed fields.
//!
//! An identity outlives compilers and libraries, so no text that `Debug` or `Display` makes of a type enters one. Every
//! field is one byte that says its kind, then its value: numbers in eight bytes, little-endian, texts and bytes after
//! their length, lists after their count, an option as "nothing" or as "something" and the value.
//!
//! Invariant: what is fed can be read back field by field, so two different sequences of fields never feed the same
//! bytes.

use sha2::{Digest as _, Sha256};

use crate::{Digest, Identity, Ratio};

/// A value that may enter an identity.
pub trait Field {
    /// Feeds its kind and its value.
    fn feed(&self, framed: &mut Framed);
}

/// A framing SHA-256 hasher.
///
/// ```
/// use contract::Framed;
/// let pair = |a: &str, b: &str| Framed::new("pair", 1).field(a).field(b).finish();
/// assert_ne!(pair("ab", "c"), pair("a", "bc"));
/// ```
#[derive(Clone)]
pub struct Framed {
    hash: Sha256,
    #[cfg(test)]
    fed: Vec<u8>,
}

impl Framed {
    /// Begins an identity of the kind `tag`, in this version of its fields.
    pub fn new(tag: &str, version: u32) -> Self {
        let mut framed = Framed {
            hash: Sha256::new(),
            #[cfg(test)]
            fed: Vec::new(),
        };
        framed.field(tag).field(&version);
        framed
    }

    /// The next field.
    pub fn field<T: Field + ?Sized>(&mut self, value: &T) -> &mut Self {
        value.feed(self);
        self
    }

    /// The count of a list whose fields follow: for what no single [`Field`] is.
    pub fn count(&mut self, count: usize) -> &mut Self {
        self.put(b'[', &(count as u64).to_le_bytes())
    }

    /// The identity of everything fed so far.
    pub fn finish(&self) -> Identity {
        Identity(self.hash.clone().finalize().into())
    }

    fn put(&mut self, kind: u8, value: &[u8]) -> &mut Self {
        self.hash.update([kind]);
        self.hash.update(value);
        #[cfg(test)]
        self.fed.extend([kind].iter().chain(value));
        self
    }

    fn text(&mut self, kind: u8, value: &[u8]) -> &mut Self {
        self.put(kind, &(value.len() as u64).to_le_bytes());
        self.hash.update(value);
        #[cfg(test)]
        self.fed.extend(value);
        self
    }
}

impl Field for u64 {
    fn feed(&self, framed: &mut Framed) {
        framed.put(b'u', &self.to_le_bytes());
    }
}

impl Field for u32 {
    fn feed(&self, framed: &mut Framed) {
        u64::from(*self).feed(framed);
    }
}

impl Field for bool {
    fn feed(&self, framed: &mut Framed) {
        framed.put(b'b', &[u8::from(*self)]);
    }
}

impl Field for str {
    fn feed(&self, framed: &mut Framed) {
        framed.text(b's', self.as_bytes());
    }
}

impl Field for String {
    fn feed(&self, framed: &mut Framed) {
        self.as_str().feed(framed);
    }
}

impl Field for Ratio {
    fn feed(&self, framed: &mut Framed) {
        framed.put(b'r', &self.num().to_le_bytes()).put(b'/', &self.den().to_le_bytes());
    }
}

impl Field for Digest {
    fn feed(&self, framed: &mut Framed) {
        framed.put(b'd', &self.0.to_le_bytes());
    }
}

impl Field for Identity {
    fn feed(&self, framed: &mut Framed) {
        framed.put(b'i', &self.0);
    }
}

impl<T: Field> Field for Option<T> {
    fn feed(&self, framed: &mut Framed) {
        match self {
            None => {
                framed.put(b'-', &[]);
            }
            Some(value) => {
                framed.put(b'+', &[]).field(value);
            }
        }
    }
}

impl<T: Field> Field for [T] {
    fn feed(&self, framed: &mut Framed) {
        framed.count(self.len());
        self.iter().for_each(|value| value.feed(framed));
    }
}

impl<T: Field> Field for Vec<T> {
    fn feed(&self, framed: &mut Framed) {
        self.as_slice().feed(framed);
    }
}

impl<T: Field + ?Sized> Field for &T {
    fn feed(&self, framed: &mut Framed) {
        (**self).feed(framed);
    }
}

/// A text in quotes, for canonical texts: `"` and `\` are escaped by `\`, control characters as `\u{XX}`, and all other
/// characters stand for themselves. Unlike `Debug`, no table of a compiler or of Unicode decides it.
pub fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for character in text.chars() {
        match character {
            '"' | '\\' => out.extend(['\\', character]),
            '\n' => out += "\\n",
            '\r' => out += "\\r",
            '\t' => out += "\\t",
            // The control characters of ASCII and Latin-1, whose numbers never change.
            '\0'..='\u{1f}' | '\u{7f}'..='\u{9f}' => {
                out += &format!("\\u{{{:x}}}", u32::from(character));
            }
            _ => out.push(character),
        }
    }
    out.push('"');
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A sequence of fields as data.
    #[derive(Clone, Debug, PartialEq)]
    enum Value {
        Number(u64),
        Truth(bool),
        Text(String),
        Share(u64, u64),
        Digest(u128),
        Identity([u8; 32]),
        Maybe(Option<Box<Value>>),
        List(Vec<Value>),
    }

    impl Field for Value {
        fn feed(&self, framed: &mut Framed) {
            match self {
                Value::Number(value) => value.feed(framed),
                Value::Truth(value) => value.feed(framed),
                Value::Text(value) => value.feed(framed),
                Value::Share(num, den) => Ratio::new(*num, *den).feed(framed),
                Value::Digest(value) => Digest(*value).feed(framed),
                Value::Identity(value) => Identity(*value).feed(framed),
                Value::Maybe(value) => value.as_deref().feed(framed),
                Value::List(values) => values.feed(framed),
            }
        }
    }

    fn values() -> impl Strategy<Value = Value> {
        let ratio = (any::<u64>(), 1..u64::MAX).prop_map(|(num, den)| {
            let ratio = Ratio::new(num, den);
            Value::Share(ratio.num(), ratio.den())
        });
        let leaf = prop_oneof![
            any::<u64>().prop_map(Value::Number),
            any::<bool>().prop_map(Value::Truth),
            ".{0,6}".prop_map(Value::Text),
            ratio,
            any::<u128>().prop_map(Value::Digest),
            any::<[u8; 32]>().prop_map(Value::Identity),
        ];
        leaf.prop_recursive(3, 20, 4, |inner| {
            prop_oneof![
                prop::option::of(inner.clone().prop_map(Box::new)).prop_map(Value::Maybe),
                prop::collection::vec(inner, 0..4).prop_map(Value::List),
            ]
        })
    }

    /// Reads back what was fed, by the head of this file alone.
    fn read(bytes: &mut &[u8]) -> Value {
        fn take<'a>(bytes: &mut &'a [u8], count: usize) -> &'a [u8] {
            let (head, rest) = bytes.split_at(count);
            *bytes = rest;
            head
        }
        let number = |bytes: &mut &[u8]| u64::from_le_bytes(take(bytes, 8).try_into().unwrap());
        match take(bytes, 1)[0] {
            b'u' => Value::Number(number(bytes)),
            b'b' => Value::Truth(take(bytes, 1)[0] == 1),
            b's' => {
                let length = number(bytes) as usize;
                Value::Text(String::from_utf8(take(bytes, length).to_vec()).unwrap())
            }
            b'r' => {
                let num = number(bytes);
                assert_eq!(take(bytes, 1), b"/");
                Value::Share(num, number(bytes))
            }
            b'd' => Value::Digest(u128::from_le_bytes(take(bytes, 16).try_into().unwrap())),
            b'i' => Value::Identity(take(bytes, 32).try_into().unwrap()),
            b'-' => Value::Maybe(None),
            b'+' => Value::Maybe(Some(Box::new(read(bytes)))),
            b'[' => {
                let count = number(bytes);
                Value::List((0..count).map(|_| read(bytes)).collect())
            }
            kind => panic!("a field of kind {kind}"),
        }
    }

    proptest! {
        /// So no two sequences of fields feed the same bytes.
        #[test]
        fn whatever_is_fed_reads_back(values in prop::collection::vec(values(), 0..6)) {
            let mut framed = Framed::new("caf\u{e9}", 7);
            values.iter().for_each(|value| { framed.field(value); });
            let mut fed = &framed.fed[..];
            prop_assert_eq!(read(&mut fed), Value::Text("caf\u{e9}".to_owned()));
            prop_assert_eq!(read(&mut fed), Value::Number(7));
            for value in &values {
                prop_assert_eq!(&read(&mut fed), value);
            }
            prop_assert!(fed.is_empty());
            prop_assert_eq!(framed.finish(), Identity::of_bytes(&framed.fed));
        }

        #[test]
        fn quoted_texts_stand_apart(a in any::<String>(), b in any::<String>(), c in any::<String>()) {
            // Two texts in a row, and where one ends: at the first quote without a backslash.
            let pair = quoted(&a) + &quoted(&b);
            prop_assert_eq!(pair == quoted(&c), false);
            prop_assert_eq!(quoted(&a) == quoted(&b), a == b);
            let mut escaped = false;
            let end = quoted(&a)[1..].find(|character| {
                let ends = character == '"' && !escaped;
                escaped = character == '\\' && !escaped;
                ends
            });
            prop_assert_eq!(end, Some(quoted(&a).len() - 2));
        }
    }

    #[test]
    fn quoting_depends_on_no_table() {
        // A letter, a combining mark, an unassigned character, a line separator: all as they are.
        let text = "caf\u{e9} e\u{301} \u{1f9ff}\u{e0fff} \u{2028}";
        assert_eq!(quoted(text), format!("\"{text}\""));
        assert_eq!(quoted("a\"\\\n\t\r\0\u{85}"), "\"a\\\"\\\\\\n\\t\\r\\u{0}\\u{85}\"");
    }
}
