//! The store in which ranks meet and leave word.

use std::ffi::{c_int, c_void};
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, TcpListener, ToSocketAddrs as _};
use std::os::fd::IntoRawFd;
use std::ptr;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::ffi::{
    shim_lived, shim_store_find, shim_store_first, shim_store_free, shim_store_open, shim_store_set,
};
use super::peers::is_loopback;
use super::word::Word;
use super::{milliseconds, text};
use crate::runtime::{guarded, number, said};
use crate::{Error, Result};

/// Between two looks for ranks that have not come yet.
pub(super) const LOOK: Duration = Duration::from_millis(5);

/// How long an answer is waited for before the time that was lived is looked at.
const TURN: Duration = Duration::from_millis(50);

/// Under this key the first rank that stops leaves its word.
pub(super) const FAULT: &str = "fault";

/// A store of small texts that all ranks share.
///
/// Its requests run on a thread of its own: c10d waits for an answer without a deadline, and a network that is cut gives
/// none. What does not answer in time is given up, with the thread. Time in which this process was stopped does not count:
/// it was not the store that kept anybody waiting then.
#[derive(Debug)]
pub struct Store {
    pub(super) handle: Handle,
    port: u16,
    timeout: Duration,
    requests: Mutex<Option<Sender<Request>>>,
}

type Request = Box<dyn FnOnce() + Send>;

/// The C++ store. Freed by the last who holds it; a thread that was given up holds it for ever.
#[derive(Clone, Debug)]
pub(super) struct Handle(Arc<Raw>);

#[derive(Debug)]
struct Raw(*mut c_void);

// SAFETY: c10d's TCPStore takes a lock of its own in every operation.
unsafe impl Send for Raw {}
// SAFETY: as above.
unsafe impl Sync for Raw {}

impl Handle {
    pub(super) fn raw(&self) -> *mut c_void {
        self.0.0
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // SAFETY: made by `shim_store_open`, freed once.
        unsafe { shim_store_free(self.0) }
    }
}

impl Store {
    /// Holds a store at `host`; port 0 lets the system choose one.
    pub fn serve(host: &str, port: u16, name: &str, timeout: Duration) -> Result<Store> {
        Store::open(host, port, true, name, timeout)
    }

    /// Reaches a store that another process holds, waiting until it is there.
    pub fn connect(host: &str, port: u16, name: &str, timeout: Duration) -> Result<Store> {
        Store::open(host, port, false, name, timeout)
    }

    pub(super) fn open(
        host: &str,
        port: u16,
        serve: bool,
        name: &str,
        timeout: Duration,
    ) -> Result<Store> {
        // A name that leads nowhere is found out here: the library would ask for it again and again.
        let address = resolved(host, port, timeout)?;
        let listener = serve.then(|| listener(host, port, address)).transpose()?;
        let port = match &listener {
            Some(listener) => listener.local_addr().map_err(cannot)?.port(),
            None => port,
        };
        // The library closes it.
        let listener = listener.map_or(-1, IntoRawFd::into_raw_fd);
        let (host, name) = (text(host)?, text(name)?);
        let (mut handle, mut bound) = (ptr::null_mut(), 0);
        // SAFETY: both texts and both out-pointers outlive the call; the socket is handed over.
        guarded("open the store", unsafe {
            shim_store_open(
                host.as_ptr(),
                c_int::from(port),
                listener,
                name.as_ptr(),
                milliseconds(timeout),
                &raw mut handle,
                &raw mut bound,
            )
        })?;
        let (requests, inbox) = channel::<Request>();
        std::thread::spawn(move || inbox.into_iter().for_each(|request| request()));
        let (handle, requests) = (Handle(Arc::new(Raw(handle))), Mutex::new(Some(requests)));
        Ok(Store { handle, port: bound as u16, timeout, requests })
    }

    /// From here on an answer is waited for at most so long.
    pub(super) fn wait_at_most(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Runs a request on the store's thread; after one that is not answered there are no more.
    fn ask<T: Send + 'static>(
        &self,
        call: &'static str,
        request: impl FnOnce(Handle) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let gone = || Error::Foreign { call, reason: "the store does not answer".to_owned() };
        let (answer, answered) = channel();
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        let handle = self.handle.clone();
        let queued = requests.as_ref().ok_or_else(gone)?.send(Box::new(move || {
            // Nobody listens any more if this took too long.
            let _ = answer.send(request(handle));
        }));
        queued.map_err(|_| gone())?;
        answer_within(self.timeout, &answered).unwrap_or_else(|| {
            *requests = None;
            Err(gone())
        })
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Gives `key` a value.
    pub fn set(&self, key: &str, value: &str) -> Result<()> {
        let (key, value) = (text(key)?, text(value)?);
        self.ask("write to the store", move |handle| {
            // SAFETY: the store is open and both texts outlive the call.
            let answer = unsafe { shim_store_set(handle.raw(), key.as_ptr(), value.as_ptr()) };
            guarded("write to the store", answer)
        })
    }

    /// Gives `key` a value unless it has one, and returns the one that it has then.
    pub fn first(&self, key: &str, value: &str) -> Result<String> {
        let (key, value) = (text(key)?, text(value)?);
        self.ask("write to the store", move |handle| {
            // SAFETY: the store is open and both texts outlive the call.
            let code = unsafe { shim_store_first(handle.raw(), key.as_ptr(), value.as_ptr()) };
            guarded("write to the store", code)?;
            Ok(said())
        })
    }

    /// The value of `key` once it has one; `None` if that takes longer than `timeout`. A rank that stops meanwhile for
    /// whatever reason ends the waiting.
    pub fn wait(&self, key: &str, timeout: Duration) -> Result<Option<String>> {
        let start = lived();
        loop {
            let found = self.find(key)?;
            if found.is_some() || lived() - start > timeout {
                return Ok(found);
            }
            if let Some(word) = self.word()? {
                return Err(Error::Reported { what: word.text });
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Leaves word that `ranks` are lost, unless another word stands.
    pub fn lose(&self, ranks: &[u32], what: &str) -> Result<()> {
        self.leave(&Word { lost: Some(ranks.to_vec()), text: what.to_owned() }).map(|_| ())
    }

    /// Leaves word of why ranks stop, unless another one stands. Returns that other one.
    pub(super) fn leave(&self, word: &Word) -> Result<Option<Word>> {
        let written = word.write();
        let first = self.first(FAULT, &written)?;
        Ok((first != written).then(|| Word::read(&first)))
    }

    /// The word that stands of why the ranks stop, if there is one.
    pub(super) fn word(&self) -> Result<Option<Word>> {
        Ok(self.find(FAULT)?.map(|text| Word::read(&text)))
    }

    /// The value of `key`, if it has one.
    pub fn find(&self, key: &str) -> Result<Option<String>> {
        let key = text(key)?;
        self.ask("read from the store", move |handle| {
            // SAFETY: the store is open; text and out-pointer outlive the call.
            let ask = |has| unsafe { shim_store_find(handle.raw(), key.as_ptr(), has) };
            let has = number("read from the store", ask)?;
            Ok((has != 0).then(said))
        })
    }
}

/// The first address of a host, found within `timeout`.
fn resolved(host: &str, port: u16, timeout: Duration) -> Result<IpAddr> {
    let (answer, answered) = channel();
    let asked = host.to_owned();
    // A name server that is silent is asked for longer than anybody waits.
    std::thread::spawn(move || answer.send((asked.as_str(), port).to_socket_addrs()));
    let failed = |reason: String| Error::Foreign {
        call: "find the host",
        reason: format!("{host:?} has no address: {reason}"),
    };
    let found =
        answered.recv_timeout(timeout).map_err(|_| failed("no name server answers".to_owned()))?;
    let mut found = found.map_err(|error| failed(error.to_string()))?;
    found.next().map(|address| address.ip()).ok_or_else(|| failed("the name is empty".to_owned()))
}

/// Listens for the other ranks where they look for this one, and nowhere else: on the loopback if that is where they meet, on
/// the address of `host` otherwise. Where a machine calls itself by its loopback (as `/etc/hosts` often says) or is known to
/// the others by another address than its own, everywhere.
fn listener(host: &str, port: u16, address: IpAddr) -> Result<TcpListener> {
    let everywhere = || TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).map_err(cannot);
    if address.is_loopback() && !is_loopback(host) {
        return everywhere();
    }
    match TcpListener::bind((address, port)) {
        Err(error) if error.kind() == ErrorKind::AddrNotAvailable => everywhere(),
        bound => bound.map_err(cannot),
    }
}

fn cannot(error: std::io::Error) -> Error {
    Error::Foreign { call: "listen for the other ranks", reason: error.to_string() }
}

/// The answer, if it comes before this process has lived so long.
fn answer_within<T>(timeout: Duration, answered: &Receiver<T>) -> Option<T> {
    let start = lived();
    loop {
        let left = timeout.saturating_sub(lived() - start);
        match answered.recv_timeout(left.min(TURN)) {
            Ok(answer) => return Some(answer),
            Err(RecvTimeoutError::Timeout) if !left.is_zero() => (),
            Err(_) => return None,
        }
    }
}

/// How long this process has lived since it was first asked: the clock of every deadline between ranks.
pub(super) fn lived() -> Duration {
    let mut lived = 0;
    // SAFETY: the out-pointer outlives the call. Where the clock cannot start there are no threads left at all.
    let _ = unsafe { shim_lived(&raw mut lived) };
    Duration::from_millis(lived as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead as _, BufReader, Read as _};
    use std::process::{Child, ChildStdout, Command, Stdio};
    use std::thread::sleep;

    const PATIENCE: Duration = Duration::from_millis(500);

    /// Says to a test that it is the other process which it has started.
    const ROLE: &str = "TEST_OF_THE_STORE";

    fn is_the_other() -> bool {
        std::env::var_os(ROLE).is_some()
    }

    /// Another process that runs this `test` alone, the first word that it says, and its further words.
    fn other(test: &str) -> (Child, String, BufReader<ChildStdout>) {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", &format!("group::store::tests::{test}"), "--nocapture"]);
        command.env(ROLE, "").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut said = BufReader::new(child.stdout.take().unwrap());
        let word = said.by_ref().lines().find_map(|line| {
            let line = line.unwrap();
            line.split_once("says ").map(|(_, word)| word.to_owned())
        });
        (child, word.unwrap(), said)
    }

    fn signal(name: &str, child: &Child) {
        let sent = Command::new("kill").args([name, &child.id().to_string()]).status().unwrap();
        assert!(sent.success());
    }

    /// Local addresses, in the kernel's words, on which somebody listens at `port`.
    fn listening(port: u16) -> Vec<String> {
        let tables = ["/proc/net/tcp", "/proc/net/tcp6"]
            .map(|path| std::fs::read_to_string(path).unwrap_or_default());
        let lines = tables.iter().flat_map(|table| table.lines().skip(1));
        let ends = format!(":{port:04X}");
        let words = lines.map(|line| line.split_whitespace().collect::<Vec<_>>());
        let here = words.filter(|words| words[1].ends_with(&ends) && words[3] == "0A");
        here.map(|words| words[1].to_owned()).collect()
    }

    #[test]
    fn a_store_on_the_loopback_listens_there_alone() {
        let store = Store::serve("127.0.0.1", 0, "a/", PATIENCE).unwrap();
        assert_eq!(listening(store.port()), [format!("0100007F:{:04X}", store.port())]);
        let other = Store::connect("127.0.0.1", store.port(), "a/", PATIENCE).unwrap();
        other.set("key", "value").unwrap();
        assert_eq!(store.find("key").unwrap().as_deref(), Some("value"));
    }

    #[test]
    fn a_host_that_has_no_address_is_named_at_once() {
        let start = std::time::Instant::now();
        let error = Store::connect("no-such-host.invalid", 1, "a/", 60 * PATIENCE).unwrap_err();
        assert!(error.to_string().contains("\"no-such-host.invalid\" has no address"), "{error}");
        assert!(start.elapsed() < 60 * PATIENCE);
    }

    #[test]
    fn a_process_that_was_stopped_does_not_blame_the_store() {
        if is_the_other() {
            let store = Store::serve("127.0.0.1", 0, "a/", PATIENCE).unwrap();
            println!("it says ready");
            let start = lived();
            while lived() - start < Duration::from_secs(2) {
                assert_eq!(store.find("key").unwrap(), None);
            }
            return;
        }
        let me = "a_process_that_was_stopped_does_not_blame_the_store";
        let (mut child, _, mut said) = other(me);
        for _ in 0..3 {
            sleep(PATIENCE / 2);
            signal("-STOP", &child);
            sleep(3 * PATIENCE);
            signal("-CONT", &child);
        }
        let mut rest = String::new();
        said.read_to_string(&mut rest).unwrap();
        assert!(child.wait().unwrap().success(), "{rest}");
    }

    #[test]
    fn a_store_that_was_stopped_is_given_up_in_time() {
        if is_the_other() {
            let store = Store::serve("127.0.0.1", 0, "a/", PATIENCE).unwrap();
            println!("it says {}", store.port());
            // Until the first process ends.
            std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
            return;
        }
        let (mut child, port, _said) = other("a_store_that_was_stopped_is_given_up_in_time");
        let store = Store::connect("127.0.0.1", port.parse().unwrap(), "a/", PATIENCE).unwrap();
        assert_eq!(store.find("key").unwrap(), None);
        signal("-STOP", &child);
        // A signal takes a moment to arrive.
        let (taken, error) = loop {
            let start = lived();
            if let Err(error) = store.find("key") {
                break (lived() - start, error.to_string());
            }
        };
        assert!(error.contains("does not answer"), "{error}");
        assert!((PATIENCE..8 * PATIENCE).contains(&taken), "{taken:?}");
        assert!(store.find("key").is_err(), "it is not asked again");
        signal("-KILL", &child);
        child.wait().unwrap();
    }
}
