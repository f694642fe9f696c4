//! The process that holds a store: it keeps what the others write, and admits only those that have the run's key.
//!
//! An unauthenticated connection costs a thread with a small stack and 64 bytes, for at most [`PATIENCE`]. If there are
//! more than [`UNPROVEN`] at once, the oldest is dropped, so that ranks, which prove the key in a moment, can still
//! connect.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::key::RunKey;
use super::wire::{self, Connection, ConnectionError, Deadline, Request, RequestKind};
use crate::error::is_short;

/// How long a caller may take to prove the key.
const PATIENCE: Duration = Duration::from_secs(10);

/// Maximum number of connections that have not proven the key.
const UNPROVEN: usize = 64;

/// The stack of a thread that serves one caller.
const STACK: usize = 1 << 18;

/// Pause before the next accept when the system is out of resources.
const PAUSE: Duration = Duration::from_millis(50);

/// How long the system may lack the resources to accept connections, with none admitted, before this is a fault.
const SHORTAGE: Duration = Duration::from_secs(1);

/// Refusals separated by more than this belong to different shortages.
const APART: Duration = Duration::from_millis(500);

/// With so many unproven connections, they are strangers and themselves the cause of the shortage.
const FLOOD: usize = 8;

/// Connections that were refused because they did not prove the run's key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnauthenticatedConnections {
    /// How many.
    pub refused: u64,
    /// Address of the last one, and what it did.
    pub last: String,
}

impl UnauthenticatedConnections {
    /// A short message; `None` if there was none.
    pub fn words(&self) -> Option<String> {
        let UnauthenticatedConnections { refused, last } = self;
        let connections = if *refused == 1 { "connection was" } else { "connections were" };
        (*refused > 0).then(|| {
            format!(
                "{refused} {connections} refused for want of this run's key, the last from {last}"
            )
        })
    }

    pub(super) fn written(&self) -> Vec<u8> {
        format!("{} {}", self.refused, self.last).into_bytes()
    }

    pub(super) fn read(bytes: &[u8]) -> Option<UnauthenticatedConnections> {
        let (refused, last) = str::from_utf8(bytes).ok()?.split_once(' ')?;
        Some(UnauthenticatedConnections { refused: refused.parse().ok()?, last: last.to_owned() })
    }
}

/// A store that this process holds, until it is dropped.
#[derive(Debug)]
pub(super) struct Server {
    held: Arc<ServerState>,
    address: SocketAddr,
    thread: Option<JoinHandle<()>>,
}

/// State shared by its threads.
#[derive(Debug)]
struct ServerState {
    key: RunKey,
    values: Mutex<BTreeMap<String, Vec<u8>>>,
    callers: Mutex<OpenConnections>,
    over: AtomicBool,
}

/// Open connections, by the order in which they came.
#[derive(Debug, Default)]
struct OpenConnections {
    came: u64,
    unproven: VecDeque<(u64, TcpStream)>,
    proven: BTreeMap<u64, TcpStream>,
    unauthenticated: UnauthenticatedConnections,
    short: Option<ResourceShortage>,
}

/// A shortage of system resources during which no connection is admitted.
#[derive(Clone, Copy, Debug)]
struct ResourceShortage {
    since: Instant,
    last: Instant,
    /// The system's error code.
    code: i32,
}

impl OpenConnections {
    /// Notes that the system lacks the resources for a connection. Among many strangers the oldest is dropped instead.
    fn lack(&mut self, error: &io::Error) {
        if self.unproven.len() >= FLOOD {
            self.short = None;
            return self.let_first_go();
        }
        let (now, code) = (Instant::now(), error.raw_os_error().unwrap_or_default());
        let before = self.short.filter(|short| now - short.last < APART);
        self.short = Some(ResourceShortage {
            since: before.map_or(now, |short| short.since),
            last: now,
            code,
        });
    }

    /// Adds a connection; if there are too many, drops the oldest.
    fn receive(&mut self, copy: TcpStream) -> u64 {
        self.came += 1;
        self.unproven.push_back((self.came, copy));
        if self.unproven.len() > UNPROVEN {
            self.let_first_go();
        }
        self.came
    }

    fn let_first_go(&mut self) {
        if let Some((_, first)) = self.unproven.pop_front() {
            let _ = first.shutdown(Shutdown::Both);
        }
    }

    /// Removes an unproven connection; `None` if it was dropped before.
    fn take(&mut self, number: u64) -> Option<TcpStream> {
        let place = self.unproven.iter().position(|(one, _)| *one == number)?;
        self.unproven.remove(place).map(|(_, copy)| copy)
    }
}

impl Server {
    /// Serves connections to `listener` that prove `key`.
    pub(super) fn start(listener: TcpListener, key: &RunKey) -> io::Result<Server> {
        let address = listener.local_addr()?;
        let (values, callers) = (Mutex::default(), Mutex::default());
        let over = AtomicBool::new(false);
        let held = Arc::new(ServerState { key: key.clone(), values, callers, over });
        let shared = Arc::clone(&held);
        let thread = thread::Builder::new().stack_size(STACK).spawn(move || {
            while !shared.over.load(Ordering::Acquire) {
                let accepted = listener.accept();
                if let Err(error) = accepted.and_then(|(stream, from)| shared.receive(stream, from))
                {
                    shared.callers().lack(&error);
                    thread::sleep(PAUSE);
                }
            }
        })?;
        Ok(Server { held, address, thread: Some(thread) })
    }

    pub(super) fn port(&self) -> u16 {
        self.address.port()
    }

    pub(super) fn answer(&self, request: &Request<'_>) -> Option<Vec<u8>> {
        self.held.answer(request)
    }

    #[cfg(test)]
    pub(super) fn connections(&self) -> u64 {
        self.held.callers().came
    }

    /// The error of a shortage that has lasted too long.
    pub(super) fn trouble(&self) -> Option<io::Error> {
        let short = self.held.callers().short;
        let short = short.filter(|short| short.last - short.since >= SHORTAGE);
        short.map(|short| io::Error::from_raw_os_error(short.code))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.held.over.store(true, Ordering::Release);
        // The thread blocks in `accept`: this connection wakes it a last time.
        let mut address = self.address;
        match address.ip().is_unspecified() {
            true if address.is_ipv4() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
            true => address.set_ip(Ipv6Addr::LOCALHOST.into()),
            false => (),
        }
        if TcpStream::connect_timeout(&address, PAUSE).is_ok() {
            let _ = self.thread.take().map(JoinHandle::join);
        }
        let callers = self.held.callers();
        let unproven = callers.unproven.iter().map(|(_, stream)| stream);
        for stream in unproven.chain(callers.proven.values()) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl ServerState {
    fn callers(&self) -> MutexGuard<'_, OpenConnections> {
        self.callers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves a connection on its own thread. Without a free thread or descriptor the caller has to retry.
    fn receive(self: &Arc<Self>, stream: TcpStream, from: SocketAddr) -> io::Result<()> {
        let copy = stream.try_clone()?;
        let number = self.callers().receive(copy);
        let shared = Arc::clone(self);
        let thread = thread::Builder::new().stack_size(STACK).spawn(move || {
            shared.serve(stream, from, number);
            shared.callers().proven.remove(&number);
        });
        thread.map(drop).inspect_err(|_| drop(self.callers().take(number)))
    }

    /// Serves a caller that proves the key; counts one that does not.
    fn serve(&self, stream: TcpStream, from: SocketAddr, number: u64) {
        let mut proved = false;
        let admitted =
            Connection::new(stream).map_err(ConnectionError::from).and_then(|mut connection| {
                let enter = || {
                    proved = true;
                    let mut callers = self.callers();
                    let copy = callers.take(number).ok_or(io::ErrorKind::ConnectionAborted)?;
                    callers.proven.insert(number, copy);
                    callers.short = None;
                    Ok(())
                };
                connection.admit(&self.key, Deadline::after(PATIENCE), enter)?;
                Ok(connection.patiently()?)
            });
        if let Ok(mut stream) = admitted {
            // Returns when the caller disconnects.
            let _ = wire::answer_all(&mut stream, |request| self.answer(request));
            return;
        }
        let mut callers = self.callers();
        let why = match (admitted, callers.take(number)) {
            // A caller that was dropped retries.
            _ if proved => return,
            (_, None) => "it said nothing while many others came",
            (Err(ConnectionError::Lost(error)), _) if is_short(&error) => {
                return callers.lack(&error);
            }
            (Err(ConnectionError::Stranger(why)), _) => why,
            (Err(ConnectionError::Lost(error)), _) if error.kind() == io::ErrorKind::TimedOut => {
                "it did not prove the key in time"
            }
            _ => "it left without proving the key",
        };
        if !self.over.load(Ordering::Acquire) {
            callers.unauthenticated.refused += 1;
            callers.unauthenticated.last = format!("{from} ({why})");
        }
    }

    fn answer(&self, request: &Request<'_>) -> Option<Vec<u8>> {
        let mut values = self.values.lock().unwrap_or_else(PoisonError::into_inner);
        let (key, value) = (request.key, request.value);
        match request.what {
            RequestKind::Set => {
                values.insert(key.to_owned(), value.to_vec());
                None
            }
            RequestKind::First => {
                Some(values.entry(key.to_owned()).or_insert_with(|| value.to_vec()).clone())
            }
            RequestKind::Find => values.get(key).cloned(),
            RequestKind::Forget => {
                values.remove(key);
                None
            }
            RequestKind::Unauthenticated => Some(self.callers().unauthenticated.written()),
            RequestKind::Others => {
                let others = UnauthenticatedConnections::read(value)?;
                let unauthenticated = &mut self.callers().unauthenticated;
                unauthenticated.refused = unauthenticated.refused.saturating_add(others.refused);
                unauthenticated.last = others.last;
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::key::{PROOF, nonce};
    use super::*;
    use std::io::{Read as _, Write as _};

    #[test]
    fn a_want_of_files_is_a_fault_unless_it_passes_or_strangers_hold_them() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let server = Server::start(listener, &RunKey::default()).unwrap();
        let (now, emfile) = (Instant::now(), io::Error::from_raw_os_error(24));
        let lack = |since: Duration, last: Duration| {
            let mut callers = server.held.callers();
            let before = ResourceShortage { since: now - since, last: now - last, code: 24 };
            callers.short = Some(before);
            callers.lack(&emfile);
        };
        let (long, just) = (2 * SHORTAGE, Duration::ZERO);
        lack(long, just);
        assert_eq!(server.trouble().unwrap().raw_os_error(), Some(24));
        lack(long, long);
        assert!(server.trouble().is_none(), "it has passed, and this is another one");
        lack(just, just);
        assert!(server.trouble().is_none(), "it may pass");
        let streams = (0..FLOOD).map(|_| TcpStream::connect(address).unwrap());
        let unauthenticated: Vec<_> = streams.collect();
        while server.held.callers().unproven.len() < FLOOD {
            thread::sleep(Duration::from_millis(1));
        }
        lack(long, just);
        assert!(server.trouble().is_none(), "those who hold them have to go");
        drop(unauthenticated);
    }

    /// What a flood of strangers can do to a rank that is just proving the key.
    #[test]
    fn one_that_has_to_go_as_it_proves_the_key_does_not_hear_that_it_is_in() {
        let key = RunKey::of("the secret of a run");
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let server = Server::start(listener, &key).unwrap();
        let mut caller = TcpStream::connect(server.address).unwrap();
        let mut greeting = [0; 2 * PROOF];
        caller.read_exact(&mut greeting).unwrap();
        let mut callers = server.held.callers();
        let own_nonce = nonce().unwrap();
        let proof = key.proof("caller", &[&greeting[PROOF..], &own_nonce]);
        caller.write_all(&[own_nonce, proof].concat()).unwrap();
        // Enough time to admit it if the server did not check whether it was dropped.
        thread::sleep(Duration::from_millis(100));
        callers.let_first_go();
        drop(callers);
        let mut verdict = Vec::new();
        caller.read_to_end(&mut verdict).unwrap();
        assert_eq!(verdict, [0_u8; 0]);
        assert_eq!(
            server.held.callers().unauthenticated.refused,
            0,
            "it has the key, and comes again"
        );
    }
}
