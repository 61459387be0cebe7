//! Recordings of the process, and what a thread is doing.

use std::ffi::{c_char, c_void};
use std::path::PathBuf;
use std::sync::Arc;

use cualloc::held::{Locked, Mutex};
use cualloc::record::{Context, Recorder, RecorderError, Target, set_stack_source};

use crate::entry::{call, cleared, text, value};
use crate::options;
#[cfg(unix)]
use crate::results::NULL;
use crate::results::{CUALLOC_BUSY, CUALLOC_INVALID_ARGUMENT, Failure};

/// The recording that cualloc_record_start began.
static RECORDER: Mutex<Option<Recorder>> = Mutex::new(None);

/// The recording; a forked child has none, and a thread that it lacks may hold the lock.
fn recorder() -> Result<Locked<'static, Option<Recorder>>, Failure> {
    options::refuse_child()?;
    Ok(RECORDER.lock())
}

const NONE_RUNS: Failure = Failure::Said(
    CUALLOC_INVALID_ARGUMENT,
    "no recording runs that cualloc_record_start began",
);

impl From<RecorderError> for Failure {
    fn from(error: RecorderError) -> Failure {
        match error {
            RecorderError::Io(error) => Failure::Io(error),
            RecorderError::Read(error) => Failure::Io(std::io::Error::other(error)),
            _ => Failure::Said(
                CUALLOC_BUSY,
                "another recording runs in this process, or is just ending",
            ),
        }
    }
}

/// # Safety
/// `from` is null, or ends with a zero and stays as it is for as long as the result is used.
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

/// Begins to record all allocators of the process: to a file that is written until cualloc_record_stop, or, where path
/// is null, to memory, of which cualloc_record_dump writes what is newest. What is live now is recorded as held. The
/// file is new, for its owner alone, and replaces what stands there; `cualloc replay`, `view` and `export` read it.
/// One recording runs in a process.
///
/// Errors: CUALLOC_BUSY while one runs, also the one that CUALLOC_RECORD began; CUALLOC_IO if the file cannot be made;
/// CUALLOC_CONTEXT_LOST in a forked child.
///
/// Any thread, whatever context is current. A call under way on another thread may be missed.
///
/// # Safety
/// `path` is null or ends with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_record_start(path: *const c_char) -> i32 {
    // SAFETY: the caller's contract.
    call(|| unsafe { start(path, 0) })
}

/// As cualloc_record_start, with the stacks of some allocations: one for each `bytes` that are asked for, on the average
/// (rounded up to a multiple of 512; 0 for none). With some hundreds of KiB it can stay on: a stack takes microseconds,
/// and milliseconds at its first time. `cualloc export --to pprof` and `view` tell from them who holds how much.
///
/// Errors: as cualloc_record_start.
///
/// Any thread, whatever context is current. A call under way on another thread may be missed.
///
/// # Safety
/// `path` is null or ends with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_record_start_with_stacks(path: *const c_char, bytes: u64) -> i32 {
    // SAFETY: the caller's contract.
    call(|| unsafe { start(path, bytes) })
}

/// # Safety
/// `path` is null or ends with a zero.
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

/// Where the program is: a context (cualloc_context) whose name is a stack, outermost function first with semicolons
/// between, or 0 for the stack of the thread. With the data that was given with it.
///
/// Called by threads that were just given a block, without any lock held, by several at once. It must not throw. What it
/// allocates itself is not sampled.
pub type cualloc_stack_source_t = Option<unsafe extern "C" fn(data: *mut c_void) -> u32>;

/// The data of a source.
struct Data(*mut c_void);

// SAFETY: the data goes to the caller's function alone, which may be called by any thread.
unsafe impl Send for Data {}
// SAFETY: as above.
unsafe impl Sync for Data {}

impl Data {
    fn pointer(&self) -> *mut c_void {
        self.0
    }
}

/// Has samples of stacks (cualloc_record_start_with_stacks, CUALLOC_RECORD=stacks:SIZE:FILE) ask a function for the place
/// in the program; with null they take the stack of the thread again. When another function is set, or null, this waits until
/// no other thread is in the former one, for two seconds at most: that thread may wait for something that the caller
/// holds. The function and its data must stay until then, or, where that was not enough, until those calls are over.
///
/// Any thread, any time.
///
/// # Safety
/// The function may be called as it says, by any thread.
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

/// Writes a file of what the recording's rings hold now: of one to memory the newest 32767 events of each stream cache,
/// and as many others. The recording goes on. The file is made as by cualloc_record_start, when it is whole.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for null, or if no recording runs that cualloc_record_start began; CUALLOC_IO;
/// CUALLOC_CONTEXT_LOST in a forked child.
///
/// Any thread, whatever context is current.
///
/// # Safety
/// `path` is null or ends with a zero.
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

/// As cualloc_record_dump, but a memory snapshot of PyTorch's, as a pickle: its tools and its viewer open it.
///
/// Errors: as cualloc_record_dump.
///
/// Any thread, whatever context is current.
///
/// # Safety
/// `path` is null or ends with a zero.
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

/// Ends the recording, and its file. *events is how many the file has, 0 if there is none, and *lost how many the thread
/// that writes it came too late for; either may be null.
///
/// Errors: CUALLOC_INVALID_ARGUMENT if no recording runs that cualloc_record_start began; CUALLOC_IO if the file could
/// not be written: it is good as far as it goes, and the recording has ended; CUALLOC_CONTEXT_LOST in a forked child.
///
/// Any thread, whatever context is current.
///
/// # Safety
/// `events` and `lost` are null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_record_stop(events: *mut u64, lost: *mut u64) -> i32 {
    call(|| {
        for out in [events, lost] {
            if !out.is_null() {
                // SAFETY: the caller's contract.
                unsafe { cleared(out) }?;
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

/// The number of a name for what a thread is doing, for cualloc_set_context. Parts between semicolons are a stack,
/// outermost first: "train;forward". The same name has the same number. 0 if the name is null or not UTF-8, or 65535
/// others are known already: a program keeps the numbers that it gets. Of a name longer than 4096 bytes the innermost
/// parts are kept.
///
/// Any thread, any time; takes a lock.
///
/// # Safety
/// `name` is null or ends with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_context(name: *const c_char) -> u32 {
    value(|| {
        options::refuse_child()?;
        // SAFETY: the caller's contract.
        let name = unsafe { text(name, "a name is not UTF-8") }?;
        Ok(Context::new(name).id())
    })
}

/// Puts the calling thread into a context until it is put into another: what it allocates and frees carries the name in
/// recordings, and in the reports of compute-sanitizer. 0 is none. Returns the context that it was in.
///
/// Any thread, any time; each is in one of its own. Costs one store.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_set_context(context: u32) -> u32 {
    value(|| Ok(Context::from_id(context).enter().id()))
}
