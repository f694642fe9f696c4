//! The process that holds a store: it keeps what the others leave there, and lets nobody in who does not have the run's key.
//!
//! A stranger costs a thread with a small stack and 64 bytes, for [`PATIENCE`] at most; where there are more than [`UNPROVEN`] at
//! once the one that came first has to go, so that ranks, which prove the key in a moment, are let in meanwhile.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::key::RunKey;
use super::wire::{self, Connection, Deadline, Refused, Request, What};

/// How long a caller may take to prove the key.
const PATIENCE: Duration = Duration::from_secs(10);

/// Callers that have not proven it, at once.
const UNPROVEN: usize = 64;

/// The stack of a thread that serves one caller.
const STACK: usize = 1 << 18;

/// Before another connection is accepted, where the system has none left to give.
const PAUSE: Duration = Duration::from_millis(50);

/// Connections that were refused, since nobody proved the run's key on them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Strangers {
    /// How many.
    pub refused: u64,
    /// Where the last one came from, and what it did.
    pub last: String,
}

impl Strangers {
    /// In a few words; nothing where there was none.
    pub fn words(&self) -> Option<String> {
        let Strangers { refused, last } = self;
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

    pub(super) fn read(bytes: &[u8]) -> Option<Strangers> {
        let (refused, last) = str::from_utf8(bytes).ok()?.split_once(' ')?;
        Some(Strangers { refused: refused.parse().ok()?, last: last.to_owned() })
    }
}

/// A store that this process holds, until it is dropped.
#[derive(Debug)]
pub(super) struct Server {
    held: Arc<Held>,
    address: SocketAddr,
    thread: Option<JoinHandle<()>>,
}

/// What its threads share.
#[derive(Debug)]
struct Held {
    key: RunKey,
    values: Mutex<BTreeMap<String, Vec<u8>>>,
    callers: Mutex<Callers>,
    over: AtomicBool,
}

/// Open connections, by the order in which they came.
#[derive(Debug, Default)]
struct Callers {
    came: u64,
    unproven: VecDeque<(u64, TcpStream)>,
    proven: BTreeMap<u64, TcpStream>,
    strangers: Strangers,
}

impl Server {
    /// Serves those who come to `listener` and have `key`.
    pub(super) fn start(listener: TcpListener, key: &RunKey) -> io::Result<Server> {
        let address = listener.local_addr()?;
        let (values, callers) = (Mutex::default(), Mutex::default());
        let over = AtomicBool::new(false);
        let held = Arc::new(Held { key: key.clone(), values, callers, over });
        let shared = Arc::clone(&held);
        let thread = thread::Builder::new().stack_size(STACK).spawn(move || {
            while !shared.over.load(Ordering::Acquire) {
                match listener.accept() {
                    Ok((stream, from)) => shared.receive(stream, from),
                    Err(_) => thread::sleep(PAUSE),
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
}

impl Drop for Server {
    fn drop(&mut self) {
        self.held.over.store(true, Ordering::Release);
        // The thread waits for a caller: this is its last one.
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

impl Held {
    fn callers(&self) -> MutexGuard<'_, Callers> {
        self.callers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hears a caller on a thread of its own. One for whom there is none, or no descriptor, has to come again.
    fn receive(self: &Arc<Self>, stream: TcpStream, from: SocketAddr) {
        let Ok(copy) = stream.try_clone() else { return };
        let mut callers = self.callers();
        callers.came += 1;
        let number = callers.came;
        callers.unproven.push_back((number, copy));
        if callers.unproven.len() > UNPROVEN
            && let Some((_, oldest)) = callers.unproven.pop_front()
        {
            let _ = oldest.shutdown(Shutdown::Both);
        }
        drop(callers);
        let shared = Arc::clone(self);
        let thread = thread::Builder::new().stack_size(STACK).spawn(move || {
            shared.hear(stream, from, number);
            shared.callers().proven.remove(&number);
        });
        if thread.is_err() {
            self.callers().unproven.retain(|(one, _)| *one != number);
        }
    }

    /// Serves one that proves the key; counts one that does not.
    fn hear(&self, stream: TcpStream, from: SocketAddr, number: u64) {
        let admitted = Connection::new(stream).map_err(Refused::from).and_then(|mut connection| {
            connection.admit(&self.key, Deadline::after(PATIENCE))?;
            Ok(connection.patiently()?)
        });
        let mut callers = self.callers();
        let place = callers.unproven.iter().position(|(one, _)| *one == number);
        let entry = place.and_then(|place| callers.unproven.remove(place));
        let why = match (admitted, entry) {
            (Ok(mut stream), Some((_, copy))) => {
                callers.proven.insert(number, copy);
                drop(callers);
                // It ends when the caller goes.
                let _ = wire::answer_all(&mut stream, |request| self.answer(request));
                return;
            }
            // It proved the key and had to go nevertheless: it comes again.
            (Ok(_), None) => return,
            (Err(_), None) => "it said nothing while many others came",
            (Err(Refused::Stranger(why)), _) => why,
            (Err(Refused::Lost(error)), _) if error.kind() == io::ErrorKind::TimedOut => {
                "it did not prove the key in time"
            }
            (Err(Refused::Lost(_)), _) => "it left without proving the key",
        };
        if !self.over.load(Ordering::Acquire) {
            callers.strangers.refused += 1;
            callers.strangers.last = format!("{from} ({why})");
        }
    }

    fn answer(&self, request: &Request<'_>) -> Option<Vec<u8>> {
        let mut values = self.values.lock().unwrap_or_else(PoisonError::into_inner);
        let (key, value) = (request.key, request.value);
        match request.what {
            What::Set => {
                values.insert(key.to_owned(), value.to_vec());
                None
            }
            What::First => {
                Some(values.entry(key.to_owned()).or_insert_with(|| value.to_vec()).clone())
            }
            What::Find => values.get(key).cloned(),
            What::Strangers => Some(self.callers().strangers.written()),
            What::Others => {
                let others = Strangers::read(value)?;
                let strangers = &mut self.callers().strangers;
                strangers.refused = strangers.refused.saturating_add(others.refused);
                strangers.last = others.last;
                None
            }
        }
    }
}
