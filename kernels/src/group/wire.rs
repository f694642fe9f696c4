//! The protocol between a store and its callers: first the proof of the run's key, then requests and answers.
//!
//! ```text
//! store to caller   MAGIC, nonce S                              32 bytes each
//! caller to store   nonce C, proof("caller", S, C)
//! store to caller   1, proof("store", S, C); 0 and 32 bytes more where the caller's proof was wrong
//! request           1 byte what, 4 bytes length of the key, 4 of the value, key, value       little-endian
//! answer            1 byte whether there is a value, 4 bytes its length, the value
//! ```
//!
//! Only the first 64 bytes are read from a caller that has not proven the key. Deadlines count the time in which this
//! process runs, not time in which it was stopped: then it was not the other end that was slow.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use super::clock::lived;
use super::key::{Bytes32, PROOF, RunKey, drawn, same};

/// Longest duration of one system call before the deadline is checked again.
const TURN: Duration = Duration::from_millis(50);

/// The first bytes that a store sends.
const MAGIC: &Bytes32 = b"ztrain: a store of ranks, form 1";

/// Maximum lengths of a key and a value. A rank's addresses take some hundred bytes for each other rank.
const LONGEST: [usize; 2] = [1 << 12, 1 << 26];

/// A point on the clock of [`lived`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Deadline(Duration);

impl Deadline {
    pub(super) fn after(time: Duration) -> Deadline {
        Deadline(lived().saturating_add(time))
    }

    pub(super) fn left(self) -> Duration {
        self.0.saturating_sub(lived())
    }

    /// Retries a call that was interrupted or timed out, until the deadline.
    fn keep<T>(self, mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
        use ErrorKind::{Interrupted, TimedOut, WouldBlock};
        loop {
            match call() {
                Err(error) if matches!(error.kind(), Interrupted | TimedOut | WouldBlock) => {
                    if self.left().is_zero() {
                        return Err(TimedOut.into());
                    }
                }
                done => return done,
            }
        }
    }
}

/// Why a connection failed.
#[derive(Debug)]
pub(super) enum ConnectionError {
    /// The other end does not have the same key or does not speak this protocol: retrying is useless.
    Stranger(&'static str),
    /// It did not answer, or disconnected.
    Lost(io::Error),
}

impl From<io::Error> for ConnectionError {
    fn from(error: io::Error) -> Self {
        ConnectionError::Lost(error)
    }
}

/// One end of a connection.
#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
}

impl Connection {
    pub(super) fn new(stream: TcpStream) -> io::Result<Connection> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(TURN))?;
        stream.set_write_timeout(Some(TURN))?;
        Ok(Connection { stream })
    }

    /// Removes the timeout from here on.
    pub(super) fn patiently(self) -> io::Result<TcpStream> {
        self.stream.set_read_timeout(None)?;
        self.stream.set_write_timeout(None)?;
        Ok(self.stream)
    }

    fn read<const N: usize>(&mut self, deadline: Deadline) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.fill(&mut bytes, deadline)?;
        Ok(bytes)
    }

    fn fill(&mut self, mut bytes: &mut [u8], deadline: Deadline) -> io::Result<()> {
        while !bytes.is_empty() {
            match deadline.keep(|| self.stream.read(bytes))? {
                0 => return Err(ErrorKind::UnexpectedEof.into()),
                read => bytes = &mut bytes[read..],
            }
        }
        Ok(())
    }

    fn write(&mut self, mut bytes: &[u8], deadline: Deadline) -> io::Result<()> {
        while !bytes.is_empty() {
            match deadline.keep(|| self.stream.write(bytes))? {
                0 => return Err(ErrorKind::WriteZero.into()),
                written => bytes = &bytes[written..],
            }
        }
        Ok(())
    }

    /// The store's side of the proof; fails if the caller does not have the key. A caller with the key is admitted by
    /// `enter` before it gets the answer: a caller that gets it has been admitted.
    pub(super) fn admit(
        &mut self,
        key: &RunKey,
        deadline: Deadline,
        enter: impl FnOnce() -> io::Result<()>,
    ) -> Result<(), ConnectionError> {
        let nonce = drawn()?;
        self.write(&[*MAGIC, nonce].concat(), deadline)?;
        let said: [u8; 2 * PROOF] = self.read(deadline)?;
        let (other_nonce, proof) = said.split_at(PROOF);
        let known = same(&key.proof("caller", &[&nonce, other_nonce]), proof);
        let answer = if known { key.proof("store", &[&nonce, other_nonce]) } else { [0; PROOF] };
        if known {
            enter()?;
        }
        self.write(&[&[u8::from(known)], &answer[..]].concat(), deadline)?;
        if known {
            Ok(())
        } else {
            Err(ConnectionError::Stranger("its proof of the run's key is wrong"))
        }
    }

    /// The caller's side of the proof.
    pub(super) fn introduce(
        &mut self,
        key: &RunKey,
        deadline: Deadline,
    ) -> Result<(), ConnectionError> {
        let said: [u8; 2 * PROOF] = self.read(deadline)?;
        let (magic, other_nonce) = said.split_at(PROOF);
        if magic != MAGIC {
            return Err(ConnectionError::Stranger(
                "what listens there is not a store of this program",
            ));
        }
        let nonce = drawn()?;
        self.write(&[nonce, key.proof("caller", &[other_nonce, &nonce])].concat(), deadline)?;
        let said: [u8; 1 + PROOF] = self.read(deadline)?;
        match (said[0], same(&key.proof("store", &[other_nonce, &nonce]), &said[1..])) {
            (1, true) => Ok(()),
            (0, _) => Err(ConnectionError::Stranger("it refused this rank's run key")),
            _ => Err(ConnectionError::Stranger("it does not have this rank's run key")),
        }
    }

    /// Sends a request and waits for the answer.
    pub(super) fn ask(
        &mut self,
        request: &Request<'_>,
        deadline: Deadline,
    ) -> io::Result<Option<Vec<u8>>> {
        self.write(&request.written()?, deadline)?;
        let [has, length @ ..]: [u8; 5] = self.read(deadline)?;
        let mut value = vec![0; bounded(length, LONGEST[1])?];
        self.fill(&mut value, deadline)?;
        Ok((has == 1).then_some(value))
    }
}

/// Kinds of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestKind {
    /// Sets a key to a value.
    Set = 1,
    /// Sets a key unless it has a value, and returns the value that it then has.
    First = 2,
    /// Returns the value of a key.
    Find = 3,
    /// Returns the refused connections.
    Unauthenticated = 4,
    /// Adds refused connections of another store.
    Others = 5,
    /// Removes a key and its value.
    Forget = 6,
}

/// A request of a caller that has proven the key.
#[derive(Debug)]
pub(super) struct Request<'a> {
    pub(super) what: RequestKind,
    pub(super) key: &'a str,
    pub(super) value: &'a [u8],
}

impl Request<'_> {
    fn written(&self) -> io::Result<Vec<u8>> {
        let (key, value) = (self.key.as_bytes(), self.value);
        if key.len() > LONGEST[0] || value.len() > LONGEST[1] {
            return Err(io::Error::new(ErrorKind::InvalidInput, "too long for the store"));
        }
        let mut bytes = vec![self.what as u8];
        bytes.extend((key.len() as u32).to_le_bytes());
        bytes.extend((value.len() as u32).to_le_bytes());
        bytes.extend([key, value].concat());
        Ok(bytes)
    }
}

/// Answers the requests of a caller that has proven the key until it disconnects.
pub(super) fn answer_all(
    stream: &mut (impl Read + Write),
    answer: impl Fn(&Request<'_>) -> Option<Vec<u8>>,
) -> io::Result<()> {
    loop {
        let mut head = [0; 9];
        stream.read_exact(&mut head)?;
        let [what, a, b, c, d, value @ ..] = head;
        let all = [
            RequestKind::Set,
            RequestKind::First,
            RequestKind::Find,
            RequestKind::Unauthenticated,
            RequestKind::Others,
            RequestKind::Forget,
        ];
        let what = all.into_iter().find(|one| *one as u8 == what).ok_or(ErrorKind::InvalidData)?;
        let mut key = vec![0; bounded([a, b, c, d], LONGEST[0])?];
        let mut value = vec![0; bounded(value, LONGEST[1])?];
        stream.read_exact(&mut key)?;
        stream.read_exact(&mut value)?;
        let key = str::from_utf8(&key).map_err(|_| ErrorKind::InvalidData)?;
        let found = answer(&Request { what, key, value: &value });
        let mut bytes = vec![u8::from(found.is_some())];
        let found = found.unwrap_or_default();
        bytes.extend((found.len() as u32).to_le_bytes());
        bytes.extend(found);
        stream.write_all(&bytes)?;
    }
}

fn bounded(length: [u8; 4], longest: usize) -> io::Result<usize> {
    let length = u32::from_le_bytes(length) as usize;
    if length > longest { Err(ErrorKind::InvalidData.into()) } else { Ok(length) }
}
