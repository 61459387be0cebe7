// The README's examples run on the simulator.
#![cfg_attr(doc, doc = include_str!("links.md"))]
#![cfg_attr(doc, doc = include_str!("../README.md"))]
#![cfg_attr(
    not(doc),
    doc = "A caching GPU memory allocator on the raw CUDA driver API."
)]
#![deny(missing_docs)]

#[cfg(not(target_pointer_width = "64"))]
compile_error!("cualloc supports 64-bit targets only: the driver's API differs on others");

/// Implements `Debug` with these fields, marked as non-exhaustive.
macro_rules! debug_fields {
    ($([$($generics:tt)*])? $name:ident $(<$($args:tt),*>)?, $this:ident =>
     $($field:ident: $value:expr),+ $(,)?) => {
        impl $(<$($generics)*>)? ::std::fmt::Debug for $name $(<$($args),*>)? {
            fn fmt(&$this, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                f.debug_struct(stringify!($name))
                    $(.field(stringify!($field), &$value))+
                    .finish_non_exhaustive()
            }
        }
    };
}

pub mod allocator;
mod block;
pub mod buffer;
mod clock;
pub mod driver;
mod dtype;
mod environment;
pub mod error;
mod event;
pub mod exchange;
mod foreign;
mod locks;
mod nvtx;
pub mod pool;
pub mod record;
pub mod resource;
#[cfg(all(feature = "share", target_os = "linux"))]
pub mod share;
#[cfg(feature = "sim")]
pub mod sim;
mod sync;
pub mod trace;
#[cfg(all(test, not(loom), target_os = "linux", target_env = "gnu"))]
#[path = "../tests/common/watchdog.rs"]
mod watchdog;

pub use allocator::{Allocator, Block, Config, Policy, Request, Stats};
pub use block::{BlockId, Tag};
pub use buffer::{
    CopyInFlight, DeviceBuffer, DeviceCopy, DeviceSlice, DeviceSliceMut, FillValue, PinnedBuffer,
    Pod,
};
pub use error::kinds::{Error, Refused, Result};
#[doc(hidden)]
pub use locks::held;
#[doc(hidden)]
pub use locks::thread_id::ThreadId;

/// The pages of the repository.
#[cfg(doc)]
pub mod guide {
    macro_rules! pages {
        ($($name:ident $file:literal)*) => {$(
            #[doc = include_str!("links.md")]
            #[doc = include_str!($file)]
            pub mod $name {}
        )*};
    }
    pages! {
        architecture "../docs/architecture.md"
        changelog "../CHANGELOG.md"
        clients_c "../docs/clients/c.md"
        clients_cudarc "../docs/clients/cudarc.md"
        clients_cupy "../docs/clients/cupy.md"
        clients_jax "../docs/clients/jax.md"
        clients_python "../docs/clients/python.md"
        clients_pytorch "../docs/clients/pytorch.md"
        clients_rmm "../docs/clients/rmm.md"
        configuration "../docs/configuration.md"
        contract "../docs/contract.md"
        contributing "../CONTRIBUTING.md"
        coverage "../docs/coverage.md"
        decisions "../docs/decisions.md"
        devices "../docs/devices.md"
        graphs "../docs/graphs.md"
        performance "../docs/performance.md"
        platforms "../docs/platforms.md"
        ranges "../docs/ranges.md"
        recording "../docs/recording.md"
        security "../SECURITY.md"
        sharing "../docs/sharing.md"
        suspend "../docs/suspend.md"
        troubleshooting "../docs/troubleshooting.md"
        tutorial "../docs/tutorial.md"
    }
}
