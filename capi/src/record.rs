//! Recordings of the process, and the contexts of threads.

use std::ffi::{c_char, c_void};
use std::path::PathBuf;
use std::sync::Arc;

use cualloc::held::{Locked, Mutex};
use cualloc::record::{Context, Recorder, RecorderError, Target, set_stack_source};

use crate::entry::{call, clear_result, text, value};
use crate::handle_table;
#[cfg(unix)]
use crate::results::NULL;
use crate::results::{CUALLOC_BUSY, CUALLOC_INVALID_ARGUMENT, Failure};

/// The recording that cualloc_record_start began.
static RECORDER: Mutex<Option<Recorder>> = Mutex::new(None);

/// Locks the recording. Fails in a forked child: it has no recording, and a thread that does not exist there may hold
/// the lock.
fn recorder() -> Result<Locked<'static, Option<Recorder>>, Failure> {
    handle_table::refuse_child()?;
    Ok(RECORDER.lock())
}

const NONE_RUNS: Failure = Failure::Reason(
    CUALLOC_INVALID_ARGUMENT,
    "no recording runs that cualloc_record_start started",
);

impl From<RecorderError> for Failure {
    fn from(error: RecorderError) -> Failure {
        match error {
            RecorderError::Io(error) => Failure::Io(error),
            RecorderError::Read(error) => Failure::Io(std::io::Error::other(error)),
            _ => Failure::Reason(
                CUALLOC_BUSY,
                "cannot start: another recording is running in this process, or just ending",
            ),
        }
    }
}

/// # Safety
/// `from` is null, or ends with a zero and stays unchanged while the result is used.
unsafe fn path(from: *const c_char) -> Result<PathBuf, Failure> {
    #[cfg(unix)]
    {
        if from.is_null() {
            return Err(NULL);
        }
        // SAFETY: the caller's contract.
        let bytes = unsafe { std::ffi::CStr::from_ptr(from) }.to_bytes();
        let text: &std::ffi::OsStr = std::os::unix::ffi::OsStrExt::from_bytes(bytes);
        Ok(text.into())
    }
    // SAFETY: the caller's contract.
    #[cfg(not(unix))]
    unsafe {
        text(from, "a path is not UTF-8").map(PathBuf::from)
    }
}

/// Starts recording all allocators of the process: to a file that is written until cualloc_record_stop or, if path is
/// null, to memory, whose newest events cualloc_record_dump writes. Blocks that are live now are recorded as held. The
/// file is new, readable by its owner only, and replaces an existing one; `cualloc replay`, `view` and `export` read
/// it. A process has at most one recording at a time.
///
/// Errors: CUALLOC_BUSY while a recording is running, including one started by CUALLOC_RECORD; CUALLOC_IO if the file
/// cannot be created; CUALLOC_CONTEXT_LOST in a forked child.
///
/// May be called from any thread, with any current context. Calls in progress on other threads may be missed.
///
/// # Safety
/// `path` is null or zero-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_record_start(path: *const c_char) -> i32 {
    // SAFETY: the caller's contract.
    call(|| unsafe { start(path, 0) })
}

/// Like cualloc_record_start, with the stacks of sampled allocations: one per `bytes` allocated, on average (rounded up
/// to a multiple of 512; 0 for none). A rate of some hundreds of KiB is cheap enough to leave on: a stack takes
/// microseconds, and milliseconds the first time. `cualloc export --to pprof` and `view` use the stacks to show which
/// code holds how much.
///
/// Errors: as cualloc_record_start.
///
/// May be called from any thread, with any current context. Calls in progress on other threads may be missed.
///
/// # Safety
/// `path` is null or zero-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_record_start_with_stacks(path: *const c_char, bytes: u64) -> i32 {
    // SAFETY: the caller's contract.
    call(|| unsafe { start(path, bytes) })
}

/// # Safety
/// `path` is null or zero-terminated.
unsafe fn start(path: *const c_char, bytes: u64) -> Result<(), Failure> {
    drop(recorder()?);
    let file = match path.is_null() {
        true => None,
        // SAFETY: the caller's contract.
        false => Some(unsafe { self::path(path) }?),
    };
    let target = file.as_deref().map_or(Target::Memory, Target::File);
    let begun = Recorder::start_with_stacks(target, bytes)?;
    let ended = recorder()?.replace(begun);
    drop(ended);
    Ok(())
}

/// Returns the current place in the program: a context (cualloc_context) whose name is a stack, outermost function
/// first, separated by semicolons, or 0 for the native stack of the thread. Receives the data passed to
/// cualloc_set_stack_source.
///
/// Called by threads that have just been given a block, without any lock held, possibly by several at the same time. It
/// must not throw. Allocations made inside it are not sampled.
pub type cualloc_stack_source_t = Option<unsafe extern "C" fn(data: *mut c_void) -> u32>;

/// The data of a source.
struct Data(*mut c_void);

// SAFETY: the data is passed only to the caller's function, which may be called by any thread.
unsafe impl Send for Data {}
// SAFETY: as above.
unsafe impl Sync for Data {}

impl Data {
    fn pointer(&self) -> *mut c_void {
        self.0
    }
}

/// Sets the function that samples of stacks (cualloc_record_start_with_stacks, CUALLOC_RECORD=stacks:SIZE:FILE) call
/// for the place in the program; null restores the native stack of the thread. When the function is replaced or
/// removed, this call waits until no other thread is in the former one, at most two seconds, because such a thread may
/// wait for something that the caller holds. The former function and its data must stay valid until this call returns
/// or, after a timeout, until the calls in progress are over.
///
/// May be called from any thread at any time.
///
/// # Safety
/// `source` may be called from any thread, by several at the same time, as described at cualloc_stack_source_t.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_set_stack_source(
    source: cualloc_stack_source_t,
    data: *mut c_void,
) {
    let data = Data(data);
    call(|| {
        set_stack_source(
            source.map(|source| -> Arc<dyn Fn() -> Context + Send + Sync> {
                // SAFETY: the caller's contract.
                Arc::new(move || Context::from_id(unsafe { source(data.pointer()) }))
            }),
        );
        Ok(())
    });
}

/// Writes the current contents of the recording's rings to a file: for a recording to memory, the newest 32767 events
/// of each stream cache and as many of all others. The recording goes on. The file is created as by
/// cualloc_record_start, and appears once it is complete.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for null, or if no recording started by cualloc_record_start is running;
/// CUALLOC_IO; CUALLOC_CONTEXT_LOST in a forked child.
///
/// May be called from any thread, with any current context.
///
/// # Safety
/// `path` is null or zero-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_record_dump(path: *const c_char) -> i32 {
    call(|| {
        // SAFETY: the caller's contract.
        let path = unsafe { self::path(path) }?;
        let recorder = recorder()?;
        let running = recorder.as_ref().ok_or(NONE_RUNS)?;
        running.dump(&path).map_err(Failure::Io)
    })
}

/// Like cualloc_record_dump, but writes a PyTorch memory snapshot as a pickle, for PyTorch's tools and viewer.
///
/// Errors: as cualloc_record_dump.
///
/// May be called from any thread, with any current context.
///
/// # Safety
/// `path` is null or zero-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_record_snapshot(path: *const c_char) -> i32 {
    call(|| {
        // SAFETY: the caller's contract.
        let path = unsafe { self::path(path) }?;
        let recorder = recorder()?;
        let running = recorder.as_ref().ok_or(NONE_RUNS)?;
        Ok(running.dump_snapshot(&path)?)
    })
}

/// Stops the recording and completes its file. Writes to *events the number of events in the file, 0 if there is no
/// file, and to *lost the number of events that were overwritten before the writer thread read them; either pointer may
/// be null.
///
/// Errors: CUALLOC_INVALID_ARGUMENT if no recording started by cualloc_record_start is running; CUALLOC_IO if the file
/// could not be written (the recording has ended, and the file is readable up to the failure); CUALLOC_CONTEXT_LOST in
/// a forked child.
///
/// May be called from any thread, with any current context.
///
/// # Safety
/// `events` and `lost` are null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_record_stop(events: *mut u64, lost: *mut u64) -> i32 {
    call(|| {
        for out in [events, lost] {
            if !out.is_null() {
                // SAFETY: the caller's contract.
                unsafe { clear_result(out) }?;
            }
        }
        let running = recorder()?.take().ok_or(NONE_RUNS)?;
        let recorded = running.finish()?;
        for (out, count) in [(events, recorded.events), (lost, recorded.lost)] {
            if !out.is_null() {
                // SAFETY: the caller's contract.
                unsafe { out.write(count) };
            }
        }
        Ok(())
    })
}

/// Returns the number of a context, a name for what a thread is doing, for cualloc_set_context. Parts separated by
/// semicolons form a stack, outermost first: "train;forward". Equal names have equal numbers. Returns 0 if the name is
/// null or not UTF-8, or if 65535 other names are in use, so a program should keep the numbers it gets. Of a name
/// longer than 4096 bytes the innermost parts are kept.
///
/// May be called from any thread at any time; takes a lock.
///
/// # Safety
/// `name` is null or zero-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_context(name: *const c_char) -> u32 {
    value(|| {
        handle_table::refuse_child()?;
        // SAFETY: the caller's contract.
        let name = unsafe { text(name, "a name is not UTF-8") }?;
        Ok(Context::new(name).id())
    })
}

/// Sets the context of the calling thread and returns the previous one. Recordings and the reports of compute-sanitizer
/// show its name for everything the thread allocates and frees from then on. 0 is no context.
///
/// May be called from any thread at any time. Each thread has its own context. Costs one store.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_set_context(context: u32) -> u32 {
    value(|| Ok(Context::from_id(context).enter().id()))
}
