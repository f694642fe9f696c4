//! Rounds of transfers, and the stream on which the communication thread queues them.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use rccl_sys::{HostStream, Library};
use tch::{Device, Tensor};

use super::exchange_id::ExchangeId;
use crate::device::{Event, SideStream};
use crate::{Error, Result};

/// Progress of the round of a transfer, for the thread that waits for it.
#[derive(Debug, Default)]
pub(super) struct Ticket {
    /// Number of the round in its communication thread, from 1; 0 until it is closed.
    number: AtomicU64,
    /// Marks the end of the round on the communication thread's stream, once it is queued.
    end: OnceLock<End>,
}

/// What marks the end of a round on its stream.
#[derive(Debug)]
pub(super) enum End {
    Device(Event),
    Host(Arc<HostStream>, u64),
}

impl End {
    /// Whether the stream has reached it.
    pub(super) fn is_over(&self) -> Result<bool> {
        match self {
            End::Device(event) => event.is_over(),
            End::Host(stream, mark) => stream.has_passed(*mark).map_err(refused),
        }
    }

    /// The event that a stream of a device can wait for.
    pub(super) fn event(&self) -> Option<&Event> {
        match self {
            End::Device(event) => Some(event),
            End::Host(..) => None,
        }
    }
}

impl Ticket {
    /// Closes the round, with this number.
    pub(super) fn close(&self, number: u64) {
        self.number.store(number, Ordering::Release);
    }

    /// The number with which it was closed.
    ///
    /// # Panics
    /// If it is not closed.
    pub(super) fn number(&self) -> u64 {
        let number = self.number.load(Ordering::Acquire);
        assert!(number > 0, "only what is closed is waited for");
        number
    }

    /// Notes that the round is queued.
    pub(super) fn queued(&self, end: End) {
        let _ = self.end.set(end);
    }

    /// Its end, once it is queued.
    pub(super) fn end(&self) -> Option<&End> {
        self.end.get()
    }
}

/// Transfers that are queued together, as one group call or as several (see `parts`).
pub(super) struct Round {
    pub(super) operation: String,
    pub(super) id: ExchangeId,
    pub(super) sends: Vec<(u32, Tensor)>,
    pub(super) receives: Vec<(u32, Tensor)>,
    /// Event after everything that the computing stream had queued when the round was closed.
    pub(super) ready: Option<Event>,
    pub(super) ticket: Arc<Ticket>,
}

impl Round {
    /// An empty round of the exchange `id`.
    pub(super) fn new(operation: &str, id: ExchangeId) -> Self {
        let (sends, receives, ticket) = (Vec::new(), Vec::new(), Arc::default());
        Round { operation: operation.to_owned(), id, sends, receives, ready: None, ticket }
    }

    pub(super) fn send(&mut self, to: u32, tensor: &Tensor) -> Arc<Ticket> {
        self.sends.push((to, tensor.shallow_clone()));
        Arc::clone(&self.ticket)
    }

    pub(super) fn receive(&mut self, from: u32, tensor: &Tensor) -> Arc<Ticket> {
        self.receives.push((from, tensor.shallow_clone()));
        Arc::clone(&self.ticket)
    }

    /// The other ranks of the round.
    pub(super) fn partners(&self) -> Vec<u32> {
        let all = self.sends.iter().chain(&self.receives);
        let mut partners: Vec<u32> = all.map(|(rank, _)| *rank).collect();
        partners.sort_unstable();
        partners.dedup();
        partners
    }
}

/// The stream on which a communicator works.
pub(super) enum CommStream {
    /// A stream of the device, next to the computing one.
    Device(SideStream, *mut c_void),
    /// A stream of the library itself, for host memory.
    Host(Arc<HostStream>),
}

// SAFETY: a stream may be used from any thread, and the one that queues rounds is the only one that does.
unsafe impl Send for CommStream {}

impl CommStream {
    /// A stream for `device`, or why one cannot be created.
    pub(super) fn new(device: Device) -> std::result::Result<CommStream, String> {
        let library = Library::open()?;
        let Device::Cuda(index) = device else {
            return library.host_stream().map(Arc::new).map(CommStream::Host);
        };
        let made = SideStream::new(index).and_then(|side| side.raw().map(|raw| (side, raw)));
        made.map(|(side, raw)| CommStream::Device(side, raw)).map_err(|error| error.to_string())
    }

    pub(super) fn raw(&self) -> *mut c_void {
        match self {
            CommStream::Device(_, raw) => *raw,
            CommStream::Host(stream) => stream.raw(),
        }
    }

    /// Makes everything queued from here on wait for the event.
    pub(super) fn after(&self, ready: Option<&Event>) -> Result<()> {
        match (self, ready) {
            (CommStream::Device(side, _), Some(mark)) => side.after(mark),
            _ => Ok(()),
        }
    }

    /// Marks the end of what was queued so far.
    pub(super) fn mark(&self) -> Result<End> {
        match self {
            CommStream::Device(side, _) => side.mark().map(End::Device),
            CommStream::Host(stream) => {
                let mark = stream.mark().map_err(refused)?;
                Ok(End::Host(Arc::clone(stream), mark))
            }
        }
    }
}

/// The error for a refusal of the library.
pub(super) fn refused(reason: impl Into<String>) -> Error {
    Error::Foreign { call: "move tensors between devices", reason: reason.into() }
}
