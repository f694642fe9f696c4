//! The store in which ranks meet and leave messages.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs as _};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::clock::{LOOK, lived};
use super::key::{RunKey, is_loopback};
use super::server::{Server, UnauthenticatedConnections};
use super::wire::{Connection, ConnectionError, Deadline, Request, RequestKind};
use super::word::StopReason;
use crate::error::is_short;
use crate::{Error, Result};

/// How long one attempt to connect may take.
const ATTEMPT: Duration = Duration::from_secs(5);

/// The reason reported if the port is in use already.
pub(super) const TAKEN: &str = "the port is taken";

/// Key of the report of the first rank that stops.
pub(super) const FAULT: &str = "fault";

/// A store of small texts that all ranks share. Every connection proves the run's key first.
///
/// A store that does not answer within the timeout is not asked again. Time in which this process was stopped does not
/// count, as it was not the store that was slow.
#[derive(Debug)]
pub struct KeyValueStore {
    way: Arc<Backend>,
    port: u16,
    /// Prefix of every key.
    name: String,
    /// In milliseconds.
    timeout: AtomicU64,
}

/// How the store is reached.
#[derive(Debug)]
enum Backend {
    /// Held by this process.
    Here(Server),
    /// Held by another process; `None` once it has failed to answer.
    There(Mutex<Option<Connection>>),
}

impl KeyValueStore {
    /// Holds a store at `host` for callers that have `key`; with port 0 the system chooses one.
    pub fn serve(
        host: &str,
        port: u16,
        name: &str,
        key: &RunKey,
        timeout: Duration,
    ) -> Result<KeyValueStore> {
        let address = resolved(host, port, timeout)?[0];
        let server = Server::start(listener(host, port, address)?, key).map_err(cannot)?;
        let port = server.port();
        Ok(KeyValueStore::new(Backend::Here(server), port, name, timeout))
    }

    /// Connects to a store that another process holds, waiting until it exists.
    pub fn connect(
        host: &str,
        port: u16,
        name: &str,
        key: &RunKey,
        timeout: Duration,
    ) -> Result<KeyValueStore> {
        // A host name that does not resolve fails here.
        let (addresses, deadline) = (resolved(host, port, timeout)?, Deadline::after(timeout));
        loop {
            let error = match reach(&addresses, port, key, deadline) {
                Ok(way) => return Ok(KeyValueStore::new(way, port, name, timeout)),
                Err(ConnectionError::Stranger(why)) => {
                    let what = format!("the store at {host}:{port}: {why}");
                    return Err(Error::Stranger { what });
                }
                Err(ConnectionError::Lost(error)) if is_short(&error) => {
                    return Err(Error::Short { call: "reach the store of the ranks", error });
                }
                Err(ConnectionError::Lost(error)) => error,
            };
            if deadline.left().is_zero() {
                return Err(Error::Foreign { call: "reach the store", reason: error.to_string() });
            }
            std::thread::sleep(4 * LOOK);
        }
    }

    /// Connects to a store that must exist already. If it drops the connection, as it may under a flood of strangers,
    /// retries.
    pub(super) fn ready(
        host: &str,
        port: u16,
        name: &str,
        key: &RunKey,
        timeout: Duration,
    ) -> Option<KeyValueStore> {
        use ErrorKind::{ConnectionAborted, ConnectionReset, UnexpectedEof};
        let (addresses, deadline) = (resolved(host, port, timeout).ok()?, Deadline::after(timeout));
        loop {
            match reach(&addresses, port, key, deadline) {
                Ok(way) => return Some(KeyValueStore::new(way, port, name, timeout)),
                Err(ConnectionError::Lost(error))
                    if matches!(
                        error.kind(),
                        ConnectionAborted | ConnectionReset | UnexpectedEof
                    ) && !deadline.left().is_zero() =>
                {
                    std::thread::sleep(4 * LOOK);
                }
                Err(_) => return None,
            }
        }
    }

    fn new(way: Backend, port: u16, name: &str, timeout: Duration) -> KeyValueStore {
        let timeout = AtomicU64::new(timeout.as_millis() as u64);
        KeyValueStore { way: Arc::new(way), port, name: name.to_owned(), timeout }
    }

    /// The same store, without another connection, under another prefix of every key.
    pub(super) fn named(&self, name: &str) -> KeyValueStore {
        let timeout = AtomicU64::new(self.timeout.load(Ordering::Relaxed));
        let way = Arc::clone(&self.way);
        KeyValueStore { way, port: self.port, name: name.to_owned(), timeout }
    }

    /// How many connections came to the store that this process holds.
    #[cfg(test)]
    pub(super) fn connections(&self) -> Option<u64> {
        match &*self.way {
            Backend::Here(server) => Some(server.connections()),
            Backend::There(_) => None,
        }
    }

    /// Sets the timeout of answers from here on.
    pub(super) fn wait_at_most(&self, timeout: Duration) {
        self.timeout.store(timeout.as_millis() as u64, Ordering::Relaxed);
    }

    /// Sends a request; after one without an answer no more are sent.
    fn ask(&self, what: RequestKind, key: &str, value: &[u8]) -> Result<Option<Vec<u8>>> {
        let key = &format!("{}{key}", self.name);
        let (request, call) = (Request { what, key, value }, "ask the store");
        let gone = || Error::Foreign { call, reason: "the store does not answer".to_owned() };
        let connection = match &*self.way {
            Backend::Here(server) => {
                self.check()?;
                return Ok(server.answer(&request));
            }
            Backend::There(connection) => connection,
        };
        let mut connection = connection.lock().unwrap_or_else(PoisonError::into_inner);
        let open = connection.as_mut().ok_or_else(gone)?;
        let timeout = Duration::from_millis(self.timeout.load(Ordering::Relaxed));
        let answer = open.ask(&request, Deadline::after(timeout));
        answer.map_err(|_| {
            *connection = None;
            gone()
        })
    }

    /// Fails if this process holds the store and lacks files or threads to accept connections.
    pub fn check(&self) -> Result<()> {
        let Backend::Here(server) = &*self.way else { return Ok(()) };
        match server.trouble() {
            Some(error) => Err(Error::Short { call: "hear the ranks at their store", error }),
            None => Ok(()),
        }
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Connections that were refused because they did not prove the run's key.
    pub fn unauthenticated(&self) -> Result<UnauthenticatedConnections> {
        let said = self.ask(RequestKind::Unauthenticated, "", &[])?.unwrap_or_default();
        Ok(UnauthenticatedConnections::read(&said).unwrap_or_default())
    }

    /// Adds the refused connections of another store.
    pub(super) fn add_unauthenticated(&self, others: &UnauthenticatedConnections) -> Result<()> {
        self.ask(RequestKind::Others, "", &others.written()).map(|_| ())
    }

    /// Sets `key` to a value.
    pub fn set(&self, key: &str, value: &str) -> Result<()> {
        self.put(key, value.as_bytes())
    }

    /// The same with bytes that need not be text.
    pub(super) fn put(&self, key: &str, value: &[u8]) -> Result<()> {
        self.ask(RequestKind::Set, key, value).map(|_| ())
    }

    /// Sets `key` to a value unless it has one, and returns the value that it then has.
    pub fn first(&self, key: &str, value: &str) -> Result<String> {
        Ok(text(self.ask(RequestKind::First, key, value.as_bytes())?.unwrap_or_default()))
    }

    /// The value of `key` once it has one; `None` after `timeout`. Fails as soon as a rank reports that it stops.
    pub fn wait(&self, key: &str, timeout: Duration) -> Result<Option<String>> {
        Ok(self.wait_for_bytes(key, timeout)?.map(text))
    }

    /// The same for bytes that need not be text.
    pub(super) fn wait_for_bytes(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>> {
        let start = lived();
        loop {
            let found = self.ask(RequestKind::Find, key, &[])?;
            if found.is_some() || lived() - start > timeout {
                return Ok(found);
            }
            if let Some(word) = self.word()? {
                return Err(word.error());
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Reports that `ranks` are lost, unless a report stands already.
    pub fn lose(&self, ranks: &[u32], what: &str) -> Result<()> {
        self.leave(&StopReason::loses(ranks.to_vec(), what.to_owned())).map(|_| ())
    }

    /// Reports why ranks stop, unless another report stands already. Returns that other one.
    pub(super) fn leave(&self, word: &StopReason) -> Result<Option<StopReason>> {
        let written = word.write();
        let first = self.first(FAULT, &written)?;
        Ok((first != written).then(|| StopReason::read(&first)))
    }

    /// The report that stands of why the ranks stop, if there is one.
    pub(super) fn word(&self) -> Result<Option<StopReason>> {
        Ok(self.find(FAULT)?.map(|text| StopReason::read(&text)))
    }

    /// Removes `key`, so that entries that are written all the time do not fill the store.
    pub fn forget(&self, key: &str) -> Result<()> {
        self.ask(RequestKind::Forget, key, &[]).map(|_| ())
    }

    /// The value of `key`, if it has one.
    pub fn find(&self, key: &str) -> Result<Option<String>> {
        Ok(self.ask(RequestKind::Find, key, &[])?.map(text))
    }
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Tries each address once. A stranger at one of them is returned only if no other address answers.
fn reach(
    addresses: &[IpAddr],
    port: u16,
    key: &RunKey,
    deadline: Deadline,
) -> std::result::Result<Backend, ConnectionError> {
    let mut failed = ConnectionError::Lost(ErrorKind::AddrNotAvailable.into());
    for address in addresses {
        match introduced((*address, port).into(), key, deadline) {
            Ok(connection) => return Ok(Backend::There(Mutex::new(Some(connection)))),
            Err(error) if matches!(failed, ConnectionError::Lost(_)) => failed = error,
            Err(_) => (),
        }
    }
    Err(failed)
}

fn introduced(
    address: SocketAddr,
    key: &RunKey,
    deadline: Deadline,
) -> std::result::Result<Connection, ConnectionError> {
    let time = deadline.left().clamp(LOOK, ATTEMPT);
    let stream = TcpStream::connect_timeout(&address, time)?;
    if stream.local_addr()? == stream.peer_addr()? {
        // No process listens there: the system chose that very port for this end (a self-connect).
        return Err(ConnectionError::Lost(ErrorKind::ConnectionRefused.into()));
    }
    let mut connection = Connection::new(stream)?;
    connection.introduce(key, deadline)?;
    Ok(connection)
}

/// The addresses of a host, found within `timeout`; there is at least one.
fn resolved(host: &str, port: u16, timeout: Duration) -> Result<Vec<IpAddr>> {
    let (answer, answered) = channel();
    let asked = host.to_owned();
    // On a thread: a silent name server may block for longer than the timeout.
    let ask = move || drop(answer.send((asked.as_str(), port).to_socket_addrs()));
    let failed = |reason: String| Error::Foreign {
        call: "find the host",
        reason: format!("{host:?} has no address: {reason}"),
    };
    let asking = std::thread::Builder::new().spawn(ask);
    asking.map_err(|error| Error::Short { call: "find the host", error })?;
    let found =
        answered.recv_timeout(timeout).map_err(|_| failed("no name server answers".to_owned()))?;
    let found = found.map_err(|error| failed(error.to_string()))?;
    let found: Vec<IpAddr> = found.map(|address| address.ip()).collect();
    if found.is_empty() { Err(failed("the name is empty".to_owned())) } else { Ok(found) }
}

/// Listens for the other ranks only where they connect: on the loopback if they meet there, otherwise on the address of
/// `host`. If that resolves to the loopback (as `/etc/hosts` often has it), or to an address that is not this machine's
/// own, on all addresses.
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
    if is_short(&error) {
        return Error::Short { call: "listen for the other ranks", error };
    }
    let taken = error.kind() == ErrorKind::AddrInUse;
    let call = if taken { TAKEN } else { "listen for the other ranks" };
    Error::Foreign { call, reason: error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead as _, BufReader, Read as _};
    use std::process::{Child, ChildStdout, Command, Stdio};
    use std::thread::sleep;

    const PATIENCE: Duration = Duration::from_millis(500);

    /// Environment variable that marks a test's child process.
    const ROLE: &str = "TEST_OF_THE_STORE";

    fn is_the_other() -> bool {
        std::env::var_os(ROLE).is_some()
    }

    /// A child process that runs this `test` only, the first word of its output, and the rest of the output.
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

    /// Local addresses, as the kernel prints them, on which a process listens at `port`.
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
        let store =
            KeyValueStore::serve("127.0.0.1", 0, "a/", &RunKey::default(), PATIENCE).unwrap();
        assert_eq!(listening(store.port()), [format!("0100007F:{:04X}", store.port())]);
        let other =
            KeyValueStore::connect("127.0.0.1", store.port(), "a/", &RunKey::default(), PATIENCE)
                .unwrap();
        other.set("key", "value").unwrap();
        assert_eq!(store.find("key").unwrap().as_deref(), Some("value"));
    }

    #[test]
    fn a_host_that_has_no_address_is_named_at_once() {
        let start = std::time::Instant::now();
        let error = KeyValueStore::connect(
            "no-such-host.invalid",
            1,
            "a/",
            &RunKey::default(),
            60 * PATIENCE,
        )
        .unwrap_err();
        assert!(error.to_string().contains("\"no-such-host.invalid\" has no address"), "{error}");
        assert!(start.elapsed() < 60 * PATIENCE);
    }

    #[test]
    fn a_process_that_was_stopped_does_not_blame_the_store() {
        if is_the_other() {
            let store =
                KeyValueStore::serve("127.0.0.1", 0, "a/", &RunKey::default(), PATIENCE).unwrap();
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
            let store =
                KeyValueStore::serve("127.0.0.1", 0, "a/", &RunKey::default(), PATIENCE).unwrap();
            println!("it says {}", store.port());
            // Until the first process ends.
            std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
            return;
        }
        let (mut child, port, _said) = other("a_store_that_was_stopped_is_given_up_in_time");
        let store = KeyValueStore::connect(
            "127.0.0.1",
            port.parse().unwrap(),
            "a/",
            &RunKey::default(),
            PATIENCE,
        )
        .unwrap();
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
        assert!((PATIENCE..100 * PATIENCE).contains(&taken), "{taken:?}");
        assert!(store.find("key").is_err(), "it is not asked again");
        signal("-KILL", &child);
        child.wait().unwrap();
    }
}
