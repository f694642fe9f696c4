//! RCCL and NCCL, which share a C interface, opened at run time: nothing is linked, so a machine without a GPU can
//! build, and run everything that needs none.
//!
//! Only point-to-point transfers of bytes are used: owners add sums in the order of the tree, and an all-gather is a
//! send to every other rank. The variable `ZTRAIN_RCCL` names another library to open.
//!
//! These libraries move device memory on a device's streams. A library may also offer its own streams over host memory
//! ([`HostStream`]), so that ranks without a GPU can use it, as the tests do with a stand-in. No real library does.
//!
//! State: run against that stand-in; never on a GPU.

#![expect(unsafe_code, reason = "opens a library and calls its C functions")]

use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::os::unix::ffi::OsStrExt as _;
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use libloading::os::unix::{self, RTLD_LOCAL, RTLD_NOW};

/// Names of the library to try, AMD's first.
pub const NAMES: [&CStr; 4] = [c"librccl.so.1", c"librccl.so", c"libnccl.so.2", c"libnccl.so"];

/// This variable names the one library to open instead.
pub const VARIABLE: &str = "ZTRAIN_RCCL";

/// The element type "byte" of the C interface.
const BYTE: c_int = 1;

/// Identifies a communicator before it exists: created by one rank, sent to all.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UniqueId {
    /// Opaque bytes.
    pub bytes: [u8; 128],
}

/// The result of querying a mark that the stream has not passed, as in the runtime libraries of both vendors.
const NOT_READY: c_int = 600;

type Status = c_int;
type Handle = *mut c_void;
type Stream = *mut c_void;

/// The functions of the library.
pub struct Library {
    get_version: unsafe extern "C" fn(*mut c_int) -> Status,
    get_unique_id: unsafe extern "C" fn(*mut UniqueId) -> Status,
    error_string: unsafe extern "C" fn(Status) -> *const c_char,
    comm_init_rank: unsafe extern "C" fn(*mut Handle, c_int, UniqueId, c_int) -> Status,
    comm_destroy: unsafe extern "C" fn(Handle) -> Status,
    comm_abort: unsafe extern "C" fn(Handle) -> Status,
    comm_async_error: unsafe extern "C" fn(Handle, *mut Status) -> Status,
    group_start: unsafe extern "C" fn() -> Status,
    group_end: unsafe extern "C" fn() -> Status,
    send: unsafe extern "C" fn(*const c_void, usize, c_int, c_int, Handle, Stream) -> Status,
    recv: unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, Handle, Stream) -> Status,
    host: Option<HostFunctions>,
}

/// The functions of a library that has streams over host memory.
#[derive(Clone, Copy, Debug)]
struct HostFunctions {
    create: unsafe extern "C" fn(*mut Stream) -> c_int,
    destroy: unsafe extern "C" fn(Stream) -> c_int,
    mark: unsafe extern "C" fn(Stream, *mut u64) -> c_int,
    passed: unsafe extern "C" fn(Stream, u64) -> c_int,
}

/// The result of a call.
pub type Result<T> = std::result::Result<T, String>;

impl Library {
    /// The library of this machine, opened once; the error lists the names that were tried.
    pub fn open() -> Result<&'static Library> {
        static LIBRARY: OnceLock<Result<Library>> = OnceLock::new();
        LIBRARY.get_or_init(Library::load).as_ref().map_err(String::clone)
    }

    fn load() -> Result<Library> {
        // A variable contains no zero byte, so every name converts to a C string.
        let asked = std::env::var_os(VARIABLE);
        let asked = asked.and_then(|name| CString::new(name.into_encoded_bytes()).ok());
        let names = asked.as_deref().map_or(NAMES.to_vec(), |name| vec![name]);
        let library = LoadedLibrary::first(&names).ok_or_else(|| {
            let names: Vec<_> = names.iter().map(|name| name.to_string_lossy()).collect();
            format!("none of {} could be opened", names.join(", "))
        })?;
        // SAFETY: each name belongs to the function of that type in the C interface that RCCL and NCCL share.
        unsafe {
            Ok(Library {
                get_version: library.function(c"ncclGetVersion")?,
                get_unique_id: library.function(c"ncclGetUniqueId")?,
                error_string: library.function(c"ncclGetErrorString")?,
                comm_init_rank: library.function(c"ncclCommInitRank")?,
                comm_destroy: library.function(c"ncclCommDestroy")?,
                comm_abort: library.function(c"ncclCommAbort")?,
                comm_async_error: library.function(c"ncclCommGetAsyncError")?,
                group_start: library.function(c"ncclGroupStart")?,
                group_end: library.function(c"ncclGroupEnd")?,
                send: library.function(c"ncclSend")?,
                recv: library.function(c"ncclRecv")?,
                host: host_functions(&library),
            })
        }
    }

    /// A stream of this library over host memory, if it has any.
    pub fn host_stream(&'static self) -> Result<HostStream> {
        let functions = self.host.ok_or("it moves the memory of GPUs only")?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the out-pointer outlives the call.
        match unsafe { (functions.create)(&raw mut handle) } {
            0 => Ok(HostStream { functions, handle }),
            code => Err(format!("hostStreamCreate: error {code}")),
        }
    }

    /// Its release, in the library's encoding.
    pub fn version(&self) -> Result<i32> {
        let mut version = 0;
        // SAFETY: the out-pointer outlives the call.
        self.checked("ncclGetVersion", unsafe { (self.get_version)(&raw mut version) })?;
        Ok(version)
    }

    /// A new id for a communicator. Called by one rank, which sends it to the others.
    pub fn unique_id(&self) -> Result<UniqueId> {
        let mut id = UniqueId { bytes: [0; 128] };
        // SAFETY: the out-pointer outlives the call and has the size that the interface fixes.
        self.checked("ncclGetUniqueId", unsafe { (self.get_unique_id)(&raw mut id) })?;
        Ok(id)
    }

    fn checked(&self, call: &str, answer: Status) -> Result<()> {
        if answer == 0 {
            return Ok(());
        }
        // SAFETY: the library returns a C string of its own for every number.
        let reason = unsafe { CStr::from_ptr((self.error_string)(answer)) };
        Err(format!("{call}: {}", reason.to_string_lossy()))
    }
}

/// The functions of a library that has streams over host memory.
fn host_functions(library: &LoadedLibrary) -> Option<HostFunctions> {
    // SAFETY: each name belongs to the function of that type in any library that has it.
    unsafe {
        Some(HostFunctions {
            create: library.function(c"hostStreamCreate").ok()?,
            destroy: library.function(c"hostStreamDestroy").ok()?,
            mark: library.function(c"hostStreamMark").ok()?,
            passed: library.function(c"hostStreamPassed").ok()?,
        })
    }
}

/// A library that stays open until the end of the process, so its functions stay valid. Used for all vendor libraries:
/// this one and those that compile and launch kernels.
#[derive(Debug)]
pub struct LoadedLibrary(ManuallyDrop<unix::Library>);

impl LoadedLibrary {
    /// The first of these that exists. Every symbol is resolved at once and hidden from other libraries.
    pub fn first(names: &[&CStr]) -> Option<LoadedLibrary> {
        let open = |name: &&CStr| {
            let name = OsStr::from_bytes(name.to_bytes());
            // SAFETY: opening a library runs its initializers, as linking it would; it is never closed.
            let opened = unsafe { unix::Library::open(Some(name), RTLD_NOW | RTLD_LOCAL) };
            opened.ok()
        };
        names.iter().find_map(open).map(|library| LoadedLibrary(ManuallyDrop::new(library)))
    }

    /// The function of this name.
    ///
    /// # Safety
    /// `F` is a function pointer of the type that the library's header gives it.
    pub unsafe fn function<F: Copy>(&self, name: &CStr) -> Result<F> {
        // SAFETY: the caller's promise.
        let found = unsafe { self.0.get::<F>(name) };
        found.map(|function| *function).map_err(|_| format!("it has no {}", name.to_string_lossy()))
    }
}

/// A queue of transfers between host memory, processed in order.
#[derive(Debug)]
pub struct HostStream {
    functions: HostFunctions,
    handle: Stream,
}

// SAFETY: the library lets any thread use a stream.
unsafe impl Send for HostStream {}
// SAFETY: and several at once, as the runtime libraries of devices do.
unsafe impl Sync for HostStream {}

impl HostStream {
    /// The handle for queueing transfers.
    pub fn raw(&self) -> *mut c_void {
        self.handle
    }

    /// Marks what was queued so far.
    pub fn mark(&self) -> Result<u64> {
        let mut mark = 0;
        // SAFETY: the stream is alive and the out-pointer outlives the call.
        match unsafe { (self.functions.mark)(self.handle, &raw mut mark) } {
            0 => Ok(mark),
            code => Err(format!("hostStreamMark: error {code}")),
        }
    }

    /// Whether everything before the mark is done.
    pub fn has_passed(&self, mark: u64) -> Result<bool> {
        // SAFETY: the stream is alive.
        match unsafe { (self.functions.passed)(self.handle, mark) } {
            0 => Ok(true),
            NOT_READY => Ok(false),
            code => Err(format!("hostStreamPassed: error {code}")),
        }
    }
}

impl Drop for HostStream {
    fn drop(&mut self) {
        // SAFETY: made by `hostStreamCreate`, freed once.
        let _ = unsafe { (self.functions.destroy)(self.handle) };
    }
}

/// Ranks that exchange device memory. Transfers are queued on a stream. Deadlines are up to the caller, which polls
/// [`Communicator::error`] while waiting and calls [`Communicator::abort`] when time runs out.
///
/// Invariant for the caller: one thread at a time uses it. Only [`Communicator::abort`] may be called from another
/// thread while the first hangs in a call: that is its purpose. After that every other call is refused here, because
/// the library frees the communicator that the handle refers to.
pub struct Communicator {
    library: &'static Library,
    handle: Handle,
    life: Mutex<CommunicatorState>,
    changed: Condvar,
}

/// How often an abort checks whether a group call has ended before it interrupts the call.
const GRACE: u32 = 50;

/// Pause between these checks.
const LOOK: Duration = Duration::from_millis(20);

/// Whether a communicator was given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CommunicatorState {
    Alive,
    /// A thread is about to call the library's group end, or is inside it.
    Ending,
    /// A thread is inside the library's abort, which may still access the memory of transfers.
    Aborting,
    Aborted,
}

// SAFETY: the library lets any thread use a communicator, one at a time.
unsafe impl Send for Communicator {}
// SAFETY: as above; the invariant ensures one thread at a time, except for `abort`, which may run during a call.
unsafe impl Sync for Communicator {}

impl Communicator {
    /// Joins as `rank` of `world`; returns when all ranks have joined. It has no deadline: call it on a thread that may
    /// hang, and that has selected the device.
    pub fn join(id: UniqueId, rank: u32, world: u32) -> Result<Communicator> {
        let library = Library::open()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the out-pointer outlives the call.
        library.checked("ncclCommInitRank", unsafe {
            (library.comm_init_rank)(&raw mut handle, world as c_int, id, rank as c_int)
        })?;
        let (life, changed) = (Mutex::new(CommunicatorState::Alive), Condvar::new());
        Ok(Communicator { library, handle, life, changed })
    }

    /// The error that has occurred since the last call, if any.
    pub fn error(&self) -> Result<()> {
        let mut state = 0;
        // The query never blocks, so it runs under the lock: an abort begins before or after it.
        let life = self.alive()?;
        // SAFETY: the communicator is alive while the lock is held, and the out-pointer outlives the call.
        let asked = unsafe { (self.library.comm_async_error)(self.handle, &raw mut state) };
        drop(life);
        self.library.checked("ncclCommGetAsyncError", asked)?;
        self.library.checked("a transfer", state)
    }

    /// Gives up everything under way, without waiting for other ranks. When it returns, no matter which thread called
    /// it first, the library no longer accesses the memory of transfers. It may hang (NVIDIA/nccl#549, #1013): call it
    /// on a thread that may hang, and keep the memory of the transfers until then.
    pub fn abort(&self) {
        let (mut life, mut looks) = (self.lock(), 0);
        loop {
            match *life {
                CommunicatorState::Aborted => return,
                CommunicatorState::Aborting => {
                    life = self.changed.wait(life).unwrap_or_else(PoisonError::into_inner);
                }
                // An abort that completes before the other thread enters the library would free the handles that the
                // open group refers to. Once that thread is inside, the library supports an abort during the call. Many
                // short waits instead of one: each shows that this process was running.
                CommunicatorState::Ending if looks < GRACE => {
                    looks += 1;
                    let waited = self.changed.wait_timeout(life, LOOK);
                    life = waited.unwrap_or_else(PoisonError::into_inner).0;
                }
                CommunicatorState::Alive | CommunicatorState::Ending => break,
            }
        }
        *life = CommunicatorState::Aborting;
        drop(life);
        // SAFETY: the communicator is alive, only one call gets here, and `alive` refuses every later call. Another
        // thread may hang in a call, which this function exists to end.
        let _ = unsafe { (self.library.comm_abort)(self.handle) };
        *self.lock() = CommunicatorState::Aborted;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, CommunicatorState> {
        self.life.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses calls after an abort.
    fn alive(&self) -> Result<MutexGuard<'_, CommunicatorState>> {
        let life = self.lock();
        match *life {
            CommunicatorState::Alive | CommunicatorState::Ending => Ok(life),
            CommunicatorState::Aborting | CommunicatorState::Aborted => {
                Err("the communicator was given up".to_owned())
            }
        }
    }

    /// Queues the transfers of `transfers` as one operation.
    pub fn together(&self, transfers: impl FnOnce() -> Result<()>) -> Result<()> {
        drop(self.alive()?);
        // SAFETY: takes nothing.
        self.library.checked("ncclGroupStart", unsafe { (self.library.group_start)() })?;
        let queued = transfers();
        // If the communicator was given up meanwhile, the group refers to a freed handle: leave it open on this thread,
        // which has no other use for it.
        *self.alive()? = CommunicatorState::Ending;
        // SAFETY: takes no argument; closes the group opened above, even if a transfer was refused. An abort waits
        // until this call is inside the library.
        let ended = self.library.checked("ncclGroupEnd", unsafe { (self.library.group_end)() });
        let mut life = self.lock();
        if *life == CommunicatorState::Ending {
            *life = CommunicatorState::Alive;
        }
        drop(life);
        self.changed.notify_all();
        queued.and(ended)
    }

    /// Queues sending `bytes` bytes to `to`; inside [`Communicator::together`].
    ///
    /// # Safety
    /// `data` is device memory of that size that is not written until the stream has passed this transfer.
    pub unsafe fn send(
        &self,
        data: *const c_void,
        bytes: usize,
        to: u32,
        stream: Stream,
    ) -> Result<()> {
        let life = self.alive()?;
        // SAFETY: the caller's promise; within a group this only records the transfer, under the lock.
        let sent =
            unsafe { (self.library.send)(data, bytes, BYTE, to as c_int, self.handle, stream) };
        drop(life);
        self.library.checked("ncclSend", sent)
    }

    /// Queues receiving `bytes` bytes from `from`; inside [`Communicator::together`].
    ///
    /// # Safety
    /// `data` is device memory of that size that is not accessed until the stream has passed this transfer.
    pub unsafe fn receive(
        &self,
        data: *mut c_void,
        bytes: usize,
        from: u32,
        stream: Stream,
    ) -> Result<()> {
        let life = self.alive()?;
        // SAFETY: as for `send`.
        let received =
            unsafe { (self.library.recv)(data, bytes, BYTE, from as c_int, self.handle, stream) };
        drop(life);
        self.library.checked("ncclRecv", received)
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if *self.lock() == CommunicatorState::Alive {
            // SAFETY: the communicator is alive and not used after this.
            let _ = unsafe { (self.library.comm_destroy)(self.handle) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::thread::{scope, sleep};

    /// Calls of the stand-in below that used a handle, and the number of aborts.
    static USES: AtomicU32 = AtomicU32::new(0);
    static ABORTS: AtomicU32 = AtomicU32::new(0);

    const SLOW: Duration = Duration::from_millis(200);

    extern "C" fn number(out: *mut c_int) -> Status {
        // SAFETY: the caller's out-pointer.
        unsafe { *out = 1 };
        0
    }
    extern "C" fn name(_: *mut UniqueId) -> Status {
        0
    }
    extern "C" fn words(_: Status) -> *const c_char {
        c"refused".as_ptr()
    }
    extern "C" fn join(_: *mut Handle, _: c_int, _: UniqueId, _: c_int) -> Status {
        0
    }
    extern "C" fn end(_: Handle) -> Status {
        USES.fetch_add(1, Ordering::SeqCst);
        0
    }
    extern "C" fn slow_abort(_: Handle) -> Status {
        sleep(SLOW);
        ABORTS.fetch_add(1, Ordering::SeqCst);
        0
    }
    extern "C" fn state(_: Handle, out: *mut Status) -> Status {
        USES.fetch_add(1, Ordering::SeqCst);
        // SAFETY: the caller's out-pointer.
        unsafe { *out = 0 };
        0
    }
    extern "C" fn group() -> Status {
        0
    }
    extern "C" fn group_end() -> Status {
        USES.fetch_add(1, Ordering::SeqCst);
        0
    }
    extern "C" fn send(
        _: *const c_void,
        _: usize,
        _: c_int,
        _: c_int,
        _: Handle,
        _: Stream,
    ) -> Status {
        USES.fetch_add(1, Ordering::SeqCst);
        0
    }
    extern "C" fn receive(
        _: *mut c_void,
        _: usize,
        _: c_int,
        _: c_int,
        _: Handle,
        _: Stream,
    ) -> Status {
        USES.fetch_add(1, Ordering::SeqCst);
        0
    }

    /// Group ends that took their time, and aborts that came before their end.
    static ENDS: AtomicU32 = AtomicU32::new(0);
    static INSIDE: AtomicU32 = AtomicU32::new(0);

    extern "C" fn slow_end() -> Status {
        sleep(SLOW);
        ENDS.fetch_add(1, Ordering::SeqCst);
        0
    }
    extern "C" fn abort_after_end(_: Handle) -> Status {
        INSIDE.fetch_add(u32::from(ENDS.load(Ordering::SeqCst) == 0), Ordering::SeqCst);
        0
    }

    /// A thread may be delayed between its last check of the communicator and the library call; here for as long as a
    /// group end takes.
    #[test]
    fn an_abort_lets_the_end_of_a_group_begin() {
        let library = Library { group_end: slow_end, comm_abort: abort_after_end, ..stand_in() };
        let (library, handle) = (&*Box::leak(Box::new(library)), std::ptr::null_mut());
        let (life, changed) = (Mutex::new(CommunicatorState::Alive), Condvar::new());
        let communicator = Communicator { library, handle, life, changed };
        scope(|scope| {
            scope.spawn(|| communicator.together(|| Ok(())));
            while *communicator.lock() != CommunicatorState::Ending {
                sleep(SLOW / 100);
            }
            communicator.abort();
        });
        assert_eq!((ENDS.load(Ordering::SeqCst), INSIDE.load(Ordering::SeqCst)), (1, 0));
        assert!(communicator.together(|| Ok(())).is_err(), "it was given up all the same");
    }

    /// An abort exists to end calls that never return.
    #[test]
    fn an_abort_does_not_wait_for_the_end_of_a_group_for_ever() {
        extern "C" fn aborted(_: Handle) -> Status {
            0
        }
        let library = Library { comm_abort: aborted, ..stand_in() };
        let (library, handle) = (&*Box::leak(Box::new(library)), std::ptr::null_mut());
        let (life, changed) = (Mutex::new(CommunicatorState::Ending), Condvar::new());
        let communicator = Communicator { library, handle, life, changed };
        communicator.abort();
        assert_eq!(*communicator.lock(), CommunicatorState::Aborted);
    }

    /// A library that counts calls.
    fn stand_in() -> Library {
        Library {
            get_version: number,
            get_unique_id: name,
            error_string: words,
            comm_init_rank: join,
            comm_destroy: end,
            comm_abort: slow_abort,
            comm_async_error: state,
            group_start: group,
            group_end,
            send,
            recv: receive,
            host: None,
        }
    }

    #[test]
    fn nothing_uses_a_communicator_that_is_given_up_and_nobody_returns_before_it_is() {
        let (library, handle) = (&*Box::leak(Box::new(stand_in())), std::ptr::null_mut());
        let (life, changed) = (Mutex::new(CommunicatorState::Alive), Condvar::new());
        let communicator = Communicator { library, handle, life, changed };
        communicator.together(|| Ok(())).unwrap();
        let before = USES.load(Ordering::SeqCst);
        let null = std::ptr::null_mut();
        let inside = communicator.together(|| {
            scope(|scope| {
                scope.spawn(|| communicator.abort());
                sleep(SLOW / 4);
                // SAFETY: the stand-in touches no memory.
                let answers = unsafe {
                    [
                        communicator.send(null, 0, 0, null),
                        communicator.receive(null, 0, 0, null),
                        communicator.error(),
                    ]
                };
                assert!(answers.iter().all(Result::is_err));
                assert_eq!(ABORTS.load(Ordering::SeqCst), 0, "the abort is still under way");
                communicator.abort();
                assert_eq!(ABORTS.load(Ordering::SeqCst), 1, "the second caller has waited for it");
            });
            Ok(())
        });
        assert!(inside.is_err());
        drop(communicator);
        assert_eq!(USES.load(Ordering::SeqCst), before, "no call got through");
    }

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
