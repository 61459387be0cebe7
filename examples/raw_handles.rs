//! Memory for code in C or C++: an allocator behind C functions, with streams that the caller made and destroys.
//!
//! ```text
//! cargo run --example raw_handles --features sim
//! ```
//!
//! The functions below are what a C header would declare as
//!
//! ```c
//! void *gpu_open(CUcontext context);
//! int gpu_malloc(void *gpu, size_t bytes, CUstream stream, CUdeviceptr *out);
//! int gpu_used_by(void *gpu, CUdeviceptr block, CUstream stream);  /* another stream has used it */
//! int gpu_free(void *gpu, CUdeviceptr block);                      /* at once; work may still run */
//! int gpu_forget(void *gpu, CUstream stream);                      /* before cuStreamDestroy */
//! int gpu_close(void *gpu);
//! ```
//!
//! and `main` plays the program in C.

use std::error::Error;
use std::ffi::c_int;
use std::ptr;

use cualloc::driver::sys::{CUcontext, CUdeviceptr, CUresult, CUstream};
use cualloc::driver::{Context, Driver};
use cualloc::{Allocator, Config};

fn code<T>(result: Result<T, cualloc::Error>) -> c_int {
    match result {
        Ok(_) => 0,
        Err(error) => {
            eprintln!("gpu: {error}");
            1
        }
    }
}

/// An allocator in a context of the caller's; null on failure.
///
/// # Safety
/// The context is one of the process's driver, and lives until `gpu_close`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_open(context: CUcontext) -> *mut Allocator {
    let open = || -> Result<Allocator, Box<dyn Error>> {
        let driver = Driver::load_or_simulate()?;
        // SAFETY: as this function's contract says.
        let context = unsafe { Context::from_raw(&driver, context) }?;
        Ok(Allocator::with_config(&context, Config::from_env()?)?)
    };
    match open() {
        Ok(allocator) => Box::into_raw(Box::new(allocator)),
        Err(error) => {
            eprintln!("gpu: {error}");
            ptr::null_mut()
        }
    }
}

/// Allocates a block that is ready on the stream; returns 0 on success.
///
/// # Safety
/// `gpu` is open, the stream is live, `out` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_malloc(
    gpu: *const Allocator,
    bytes: usize,
    stream: CUstream,
    out: *mut CUdeviceptr,
) -> c_int {
    // SAFETY: as this function's contract says.
    code(unsafe {
        (*gpu)
            .allocate_raw(bytes, stream)
            .map(|block| out.write(block))
    })
}

/// Says that another stream uses a block until its free.
///
/// # Safety
/// `gpu` is open, the block and the stream are live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_used_by(
    gpu: *const Allocator,
    block: CUdeviceptr,
    stream: CUstream,
) -> c_int {
    // SAFETY: as this function's contract says.
    code(unsafe { (*gpu).record_stream_raw(block, stream) })
}

/// Frees a block; work that was given to its streams so far may still use it.
///
/// # Safety
/// `gpu` is open, and nothing is given to a stream for the block any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_free(gpu: *const Allocator, block: CUdeviceptr) -> c_int {
    // SAFETY: as this function's contract says.
    code(unsafe { (*gpu).free_raw(block) })
}

/// Forgets a stream that is about to be destroyed.
///
/// # Safety
/// `gpu` is open, the stream is live and is not used for memory any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_forget(gpu: *const Allocator, stream: CUstream) -> c_int {
    // SAFETY: as this function's contract says.
    code(unsafe { (*gpu).retire_raw(stream) })
}

/// Gives everything back; 1 if blocks are live, and then it stays open.
///
/// # Safety
/// `gpu` is open, and not used after 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_close(gpu: *mut Allocator) -> c_int {
    // SAFETY: as this function's contract says.
    let closed = code(unsafe { (*gpu).close() });
    if closed == 0 {
        // SAFETY: it comes from `gpu_open`, and is not used again.
        drop(unsafe { Box::from_raw(gpu) });
    }
    closed
}

fn main() -> Result<(), Box<dyn Error>> {
    // The program in C has the driver's functions, a context and streams.
    let driver = Driver::load_or_simulate()?;
    let context = driver.context(0)?;
    let _current = context.enter()?;
    let table = driver.functions();
    let (Some(create), Some(destroy), Some(fill)) = (
        table.cuStreamCreate,
        table.cuStreamDestroy_v2,
        table.cuMemsetD8Async,
    ) else {
        return Err("every driver has these".into());
    };
    let ok = |result: CUresult| assert_eq!(result, CUresult::CUDA_SUCCESS);

    let mut streams: [CUstream; 2] = [ptr::null_mut(); 2];
    for stream in &mut streams {
        // SAFETY: the context is current, and the handle is a local.
        ok(unsafe { create(stream, 1) });
    }
    let [compute, copy] = streams;

    // SAFETY: context and streams live until the end, blocks are freed once, streams are forgotten before they
    // are destroyed.
    unsafe {
        let gpu = gpu_open(context.raw());
        assert!(!gpu.is_null());
        let mut block = 0;
        assert_eq!(gpu_malloc(gpu, 1 << 20, compute, &mut block), 0);
        ok(fill(block, 7, 1 << 20, compute));
        // (A real program would let `copy` wait for an event of `compute` here.)
        assert_eq!(gpu_used_by(gpu, block, copy), 0);
        assert_eq!(gpu_free(gpu, block), 0);
        assert_eq!(
            gpu_free(gpu, block),
            1,
            "a second free is an error and changes nothing"
        );
        for stream in [compute, copy] {
            assert_eq!(gpu_forget(gpu, stream), 0);
            ok(destroy(stream));
        }
        assert_eq!(gpu_close(gpu), 0);
    }
    println!("one block was used on two streams of the caller");
    Ok(())
}
