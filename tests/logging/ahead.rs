//! What the thread of `ahead=on` logs is told after its step: who waits for a step does not wait for a logger, which may
//! itself wait for whoever that is.

use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::current;
use std::time::Duration;

use cualloc::allocator::{Allocator, Config, Contents, Select};
use cualloc::driver::{Stream, sys};
use cualloc::sim::{FailPlan, SimConfig, Simulator};
use cualloc::{Error, Policy};

use crate::common::MIB;

/// A logger that comes back when it is told to; it gives up one day, so that a test which waits for it fails.
struct Slow {
    line: Sender<String>,
    go_on: Receiver<()>,
}

/// The next line of the thread is for this one.
static SLOW: Mutex<Option<Slow>> = Mutex::new(None);
const ONE_DAY: Duration = Duration::from_secs(20);

fn is_ahead() -> bool {
    current().name() == Some("cualloc-ahead")
}

/// Takes a line of such a thread.
pub fn take(record: &log::Record<'_>) -> bool {
    if !is_ahead() {
        return false;
    }
    let slow = SLOW.lock().unwrap().take();
    if let Some(slow) = slow {
        slow.line.send(record.args().to_string()).unwrap();
        slow.go_on.recv_timeout(ONE_DAY).ok();
    }
    true
}

/// Has the first step of an allocator's thread fail so, and does something with the allocator while that is logged, of
/// which this is part.
fn while_told(
    code: sys::CUresult,
    words: &str,
    then: impl FnOnce(&Allocator, &Stream),
) -> Allocator {
    let sim = Simulator::new(SimConfig::with_devices(1, 1 << 30)).unwrap();
    let context = sim.driver().unwrap().context(0).unwrap();
    let config = Config::new().policy(Policy::Packed).ahead(true);
    let allocator = Allocator::with_config(&context, config).unwrap();
    let stream = Stream::new(&context).unwrap();
    let ((planned, is_planned), (line, lines), (go, go_on)) = (channel(), channel(), channel());
    *SLOW.lock().unwrap() = Some(Slow { line, go_on });
    let is_planned = Mutex::new(is_planned);
    sim.before(move |_| {
        // Later calls find the sender gone.
        if is_ahead() {
            is_planned.lock().unwrap().recv().ok();
        }
    });
    let block = allocator.allocate(20 * MIB, &stream).unwrap();
    sim.fail(FailPlan::call("cuMemCreate", code).unwrap());
    drop(planned.send(()).map(|()| planned));
    let told = lines.recv().unwrap();
    assert!(told.contains(words), "{told}");
    then(&allocator, &stream);
    drop(block);
    let closed = allocator.close();
    let lost = matches!(closed, Err(Error::ContextLost(_)));
    assert!(closed.is_ok() || lost, "{closed:?}");
    go.send(()).expect("the logger was waited for");
    allocator
}

#[test]
fn nobody_waits_for_the_logger_of_a_step() {
    super::collect();
    let code = sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY;
    drop(while_told(
        code,
        "nothing was made ahead",
        |allocator, stream| {
            assert_eq!(allocator.trim(0).unwrap().released, 0);
            // SAFETY: nothing uses the memory.
            unsafe { allocator.suspend(Select::Allocator, Contents::Drop) }.unwrap();
            allocator.resume(Select::Allocator).unwrap();
            allocator.set_limit(Some(30 << 20));
            drop(allocator.allocate(10 * MIB, stream).unwrap());
            let refused = allocator.allocate(20 * MIB, stream);
            assert!(matches!(refused, Err(Error::OutOfMemory(_))), "{refused:?}");
        },
    ));
    // The driver's own word of a lost context, too.
    let code = sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS;
    drop(while_told(
        code,
        "contexts are lost",
        |allocator, stream| {
            for refused in [
                allocator.trim(0).err(),
                allocator.allocate(40 * MIB, stream).err(),
            ] {
                assert!(
                    matches!(refused, Some(Error::ContextLost(_))),
                    "{refused:?}"
                );
            }
        },
    ));
}
