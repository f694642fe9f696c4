//! RCCL and NCCL, which share one C interface, opened at run time: nothing is linked, so a machine without a GPU builds
//! and runs all that needs none.
//!
//! Only what moves bytes is here (send, receive, all-gather, broadcast): sums are added by their owners, in the order of
//! the tree. State: compiled and refused cleanly where there is no such library; never run on a GPU.

#![expect(unsafe_code, reason = "opens a library and calls its C functions")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

unsafe extern "C" {
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// Resolve every symbol now, and keep them out of other libraries' sight.
const NOW: c_int = 2;

/// Names under which the library is looked for: AMD's first.
pub const NAMES: [&CStr; 4] = [c"librccl.so.1", c"librccl.so", c"libnccl.so.2", c"libnccl.so"];

/// The element type "byte" of the C interface.
const BYTE: c_int = 1;

/// What names a communicator before it exists: made by one rank, handed to all.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UniqueId {
    /// Its bytes, which mean nothing to us.
    pub bytes: [u8; 128],
}

type Answer = c_int;
type Handle = *mut c_void;
type Stream = *mut c_void;

/// The functions of the library.
pub struct Library {
    get_version: unsafe extern "C" fn(*mut c_int) -> Answer,
    get_unique_id: unsafe extern "C" fn(*mut UniqueId) -> Answer,
    error_string: unsafe extern "C" fn(Answer) -> *const c_char,
    comm_init_rank: unsafe extern "C" fn(*mut Handle, c_int, UniqueId, c_int) -> Answer,
    comm_destroy: unsafe extern "C" fn(Handle) -> Answer,
    comm_abort: unsafe extern "C" fn(Handle) -> Answer,
    comm_async_error: unsafe extern "C" fn(Handle, *mut Answer) -> Answer,
    group_start: unsafe extern "C" fn() -> Answer,
    group_end: unsafe extern "C" fn() -> Answer,
    send: unsafe extern "C" fn(*const c_void, usize, c_int, c_int, Handle, Stream) -> Answer,
    recv: unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, Handle, Stream) -> Answer,
    all_gather:
        unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Handle, Stream) -> Answer,
    broadcast: unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        c_int,
        c_int,
        Handle,
        Stream,
    ) -> Answer,
}

/// The result of a call.
pub type Result<T> = std::result::Result<T, String>;

impl Library {
    /// The library of this machine, opened once; the error names what was looked for.
    pub fn open() -> Result<&'static Library> {
        static LIBRARY: OnceLock<Result<Library>> = OnceLock::new();
        LIBRARY.get_or_init(Library::load).as_ref().map_err(String::clone)
    }

    fn load() -> Result<Library> {
        let handle = NAMES.iter().find_map(|name| {
            // SAFETY: the name is a C string; opening a library runs its initialisers, as linking it would.
            let handle = unsafe { dlopen(name.as_ptr(), NOW) };
            (!handle.is_null()).then_some(handle)
        });
        let names = NAMES.map(|name| name.to_string_lossy()).join(", ");
        let library = handle.ok_or_else(|| format!("none of {names} could be opened"))?;
        // SAFETY: each name stands for the function of that type in the C interface that RCCL and NCCL share.
        unsafe {
            Ok(Library {
                get_version: symbol(library, c"ncclGetVersion")?,
                get_unique_id: symbol(library, c"ncclGetUniqueId")?,
                error_string: symbol(library, c"ncclGetErrorString")?,
                comm_init_rank: symbol(library, c"ncclCommInitRank")?,
                comm_destroy: symbol(library, c"ncclCommDestroy")?,
                comm_abort: symbol(library, c"ncclCommAbort")?,
                comm_async_error: symbol(library, c"ncclCommGetAsyncError")?,
                group_start: symbol(library, c"ncclGroupStart")?,
                group_end: symbol(library, c"ncclGroupEnd")?,
                send: symbol(library, c"ncclSend")?,
                recv: symbol(library, c"ncclRecv")?,
                all_gather: symbol(library, c"ncclAllGather")?,
                broadcast: symbol(library, c"ncclBroadcast")?,
            })
        }
    }

    /// Its release, as it encodes it.
    pub fn version(&self) -> Result<i32> {
        let mut version = 0;
        // SAFETY: the out-pointer outlives the call.
        self.checked("ncclGetVersion", unsafe { (self.get_version)(&raw mut version) })?;
        Ok(version)
    }

    /// A new name for a communicator. Called by one rank, which hands it to the others.
    pub fn unique_id(&self) -> Result<UniqueId> {
        let mut id = UniqueId { bytes: [0; 128] };
        // SAFETY: the out-pointer outlives the call and has the size that the interface fixes.
        self.checked("ncclGetUniqueId", unsafe { (self.get_unique_id)(&raw mut id) })?;
        Ok(id)
    }

    fn checked(&self, call: &str, answer: Answer) -> Result<()> {
        if answer == 0 {
            return Ok(());
        }
        // SAFETY: the library answers every number with a C string of its own.
        let reason = unsafe { CStr::from_ptr((self.error_string)(answer)) };
        Err(format!("{call}: {}", reason.to_string_lossy()))
    }
}

/// # Safety
/// `T` is the type of the C function that `name` stands for.
unsafe fn symbol<T: Copy>(library: *mut c_void, name: &CStr) -> Result<T> {
    // SAFETY: the library is open and the name is a C string.
    let found = unsafe { dlsym(library, name.as_ptr()) };
    if found.is_null() {
        return Err(format!("the library lacks {}", name.to_string_lossy()));
    }
    // SAFETY: the caller's promise; a function pointer is as wide as a data pointer wherever this library exists.
    Ok(unsafe { std::mem::transmute_copy(&found) })
}

/// Ranks that exchange device memory. Transfers are queued on a stream; deadlines are the caller's, who asks for
/// [`Communicator::error`] while waiting and calls [`Communicator::abort`] when the time is up.
pub struct Communicator {
    library: &'static Library,
    handle: Handle,
}

// SAFETY: the library lets any thread use a communicator, one at a time; it is not Sync.
unsafe impl Send for Communicator {}

impl Communicator {
    /// Joins as `rank` of `world`; returns when all have. It has no deadline of its own: call it on a thread that can
    /// be given up.
    pub fn join(id: UniqueId, rank: u32, world: u32) -> Result<Communicator> {
        let library = Library::open()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the out-pointer outlives the call.
        library.checked("ncclCommInitRank", unsafe {
            (library.comm_init_rank)(&raw mut handle, world as c_int, id, rank as c_int)
        })?;
        Ok(Communicator { library, handle })
    }

    /// What went wrong meanwhile, if anything.
    pub fn error(&self) -> Result<()> {
        let mut state = 0;
        // SAFETY: the communicator is alive and the out-pointer outlives the call.
        let asked = unsafe { (self.library.comm_async_error)(self.handle, &raw mut state) };
        self.library.checked("ncclCommGetAsyncError", asked)?;
        self.library.checked("a transfer", state)
    }

    /// Gives up everything under way, without waiting for anybody.
    pub fn abort(self) {
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: the communicator is alive, and is not used or dropped again.
        let _ = unsafe { (this.library.comm_abort)(this.handle) };
    }

    /// Queues what `transfers` queues as one operation.
    pub fn together(&self, transfers: impl FnOnce() -> Result<()>) -> Result<()> {
        // SAFETY: takes nothing.
        self.library.checked("ncclGroupStart", unsafe { (self.library.group_start)() })?;
        let queued = transfers();
        // SAFETY: takes nothing; closes what was opened above, also where a transfer was refused.
        let ended = self.library.checked("ncclGroupEnd", unsafe { (self.library.group_end)() });
        queued.and(ended)
    }

    /// Queues sending `bytes` bytes to `to`.
    ///
    /// # Safety
    /// `data` is device memory of that size that nobody writes until the stream has passed this transfer.
    pub unsafe fn send(
        &self,
        data: *const c_void,
        bytes: usize,
        to: u32,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        self.library.checked("ncclSend", unsafe {
            (self.library.send)(data, bytes, BYTE, to as c_int, self.handle, stream)
        })
    }

    /// Queues receiving `bytes` bytes from `from`.
    ///
    /// # Safety
    /// `data` is device memory of that size that nobody touches until the stream has passed this transfer.
    pub unsafe fn receive(
        &self,
        data: *mut c_void,
        bytes: usize,
        from: u32,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        self.library.checked("ncclRecv", unsafe {
            (self.library.recv)(data, bytes, BYTE, from as c_int, self.handle, stream)
        })
    }

    /// Queues handing `bytes` bytes of every rank to every rank.
    ///
    /// # Safety
    /// `data` is device memory of that size and `out` of as many times that as there are ranks; both as above.
    pub unsafe fn all_gather(
        &self,
        data: *const c_void,
        out: *mut c_void,
        bytes: usize,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        self.library.checked("ncclAllGather", unsafe {
            (self.library.all_gather)(data, out, bytes, BYTE, self.handle, stream)
        })
    }

    /// Queues handing `bytes` bytes of rank `root` to every rank.
    ///
    /// # Safety
    /// Both are device memory of that size, as above.
    pub unsafe fn broadcast(
        &self,
        data: *const c_void,
        out: *mut c_void,
        bytes: usize,
        root: u32,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        self.library.checked("ncclBroadcast", unsafe {
            (self.library.broadcast)(data, out, bytes, BYTE, root as c_int, self.handle, stream)
        })
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // SAFETY: the communicator is alive, and nobody uses it after this.
        let _ = unsafe { (self.library.comm_destroy)(self.handle) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    #[test]
    fn it_answers_or_says_what_it_looked_for() {
        match Library::open() {
            Ok(library) => assert!(library.version().unwrap() > 20_000),
            Err(reason) => {
                writeln!(std::io::stderr(), "1 GPU test skipped: {reason}").unwrap();
                assert!(
                    reason.contains("librccl.so.1") && reason.contains("libnccl.so"),
                    "{reason}"
                );
                let id = UniqueId { bytes: [0; 128] };
                assert_eq!(Communicator::join(id, 0, 1).err(), Some(reason));
            }
        }
    }
}
