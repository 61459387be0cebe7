//! Modules, kernels and host functions.

use super::context::{Context, Entered};
use super::deferred::Deferred;
use super::error::DriverError;
use super::stream::Stream;
use super::sys::{self, CUstream};
use super::table::{call, thin};
use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::Arc;

const WORD_KERNELS_TEXT: &[u8] = concat!(include_str!("words.ptx"), "\0").as_bytes();

/// Kernels that fill and check words of memory.
pub(crate) const WORD_KERNELS: &CStr = match CStr::from_bytes_with_nul(WORD_KERNELS_TEXT) {
    Ok(text) => text,
    Err(_) => c"",
};
const _: () = assert!(
    !WORD_KERNELS.is_empty(),
    "the kernels' text holds a zero byte"
);

/// Code loaded into a context. Cheap to clone; unloaded with its last clone. `Send` and `Sync`.
#[derive(Clone)]
pub struct Module(Arc<Inner>);

struct Inner {
    context: Context,
    raw: sys::CUmodule,
}

// SAFETY: a module handle may be used from any thread; the driver synchronises.
unsafe impl Send for Inner {}
// SAFETY: as above, and nothing in here changes.
unsafe impl Sync for Inner {}

impl Module {
    /// Loads PTX text, which the driver compiles for the device.
    ///
    /// # Errors
    /// The driver's; `CUDA_ERROR_NOT_FOUND` without [`Feature::Kernels`](super::Feature::Kernels).
    pub fn from_ptx(context: &Context, ptx: &CStr) -> Result<Module, DriverError> {
        context.enter()?.load_module(ptx)
    }

    /// Loads an image of any kind: zero-terminated PTX, cubin or fatbin.
    ///
    /// # Errors
    /// As [`Module::from_ptx`].
    ///
    /// # Safety
    /// `image` must be complete and well-formed: the driver does not get its size.
    pub unsafe fn from_image(context: &Context, image: &[u8]) -> Result<Module, DriverError> {
        // SAFETY: the caller is responsible for the image.
        unsafe { Module::load(&context.enter()?, image.as_ptr().cast()) }
    }

    /// # Safety
    /// `image` must point to a complete and well-formed image.
    unsafe fn load(entered: &Entered<'_>, image: *const c_void) -> Result<Module, DriverError> {
        let mut raw = ptr::null_mut();
        // SAFETY: the output is a local, and the caller is responsible for the image.
        unsafe { call!(entered.driver(), cuModuleLoadData(&mut raw, image)) }?;
        Ok(Module(Arc::new(Inner {
            context: entered.context().clone(),
            raw,
        })))
    }

    /// Returns the kernel with this name.
    ///
    /// # Errors
    /// `CUDA_ERROR_NOT_FOUND` for an unknown name, or the driver's.
    pub fn function(&self, name: &CStr) -> Result<Function, DriverError> {
        let entered = self.0.context.enter()?;
        let mut raw = ptr::null_mut();
        // SAFETY: the output is a local, the module is alive, and the name ends in zero.
        unsafe {
            call!(
                entered.driver(),
                cuModuleGetFunction(&mut raw, self.0.raw, name.as_ptr())
            )
        }?;
        Ok(Function {
            _module: self.clone(),
            raw,
        })
    }
}

debug_fields!(Module, self => raw: self.0.raw);

impl Drop for Inner {
    fn drop(&mut self) {
        self.context.release(Deferred::Module(self.raw));
    }
}

/// A kernel. Keeps its module loaded. `Send` and `Sync`.
#[derive(Clone)]
pub struct Function {
    _module: Module,
    raw: sys::CUfunction,
}

// SAFETY: a function handle may be used from any thread; the driver synchronises.
unsafe impl Send for Function {}
// SAFETY: as above, and nothing in here changes.
unsafe impl Sync for Function {}

impl Function {
    /// Returns the driver's handle.
    pub fn raw(&self) -> sys::CUfunction {
        self.raw
    }

    /// Launches the kernel on a stream, with typed parameters, whose values are read before the call returns.
    ///
    /// ```
    /// # use cualloc::{driver::{Context, Driver, Stream}, sim::{SimConfig, Simulator}};
    /// # fn launch(function: &cualloc::driver::Function, stream: &Stream) -> Result<(), Box<dyn std::error::Error>> {
    /// let (values, scale) = (0x7000_0000_u64, 2.0_f32);
    /// // SAFETY: the kernel takes an address and a number, and the memory outlives the launch.
    /// unsafe { function.launch(stream, [1, 1, 1], [256, 1, 1], 0, &[&values, &scale]) }?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// The function must belong to the stream's context; `params` must match the number and types of the kernel's
    /// parameters; memory that the kernel accesses must stay valid until it has completed, without conflicting
    /// accesses. The context must outlive the launch with the function's module loaded.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: u32,
        params: &[&dyn KernelParam],
    ) -> Result<(), DriverError> {
        let mut list: Vec<*mut c_void> = params
            .iter()
            .map(|param| param.as_param().cast_mut())
            .collect();
        let entered = stream.context().enter()?;
        // SAFETY: the stream is alive, each pointer refers to a parameter's value, which the driver only reads, and the
        // caller is responsible for the rest.
        unsafe { entered.launch(self, grid, block, shared_bytes, stream.raw(), &mut list) }
    }
}

/// A value that can be passed to a kernel as a parameter: a number, an address, or device memory, which is passed as
/// its address.
///
/// # Safety
/// [`as_param`](Self::as_param) points to a value of a kernel's parameter type, readable as long as the borrow lasts.
pub unsafe trait KernelParam {
    /// Returns a pointer to the parameter's value.
    fn as_param(&self) -> *const c_void;
}

macro_rules! numbers {
    ($($number:ty)*) => {$(
        // SAFETY: the value itself.
        unsafe impl KernelParam for $number {
            fn as_param(&self) -> *const c_void {
                (&raw const *self).cast()
            }
        }
    )*};
}
numbers!(u8 u16 u32 u64 usize i8 i16 i32 i64 isize f32 f64);
#[cfg(feature = "half")]
numbers!(half::f16 half::bf16);

debug_fields!(Function, self => raw: self.raw);

#[doc(hidden)]
impl Entered<'_> {
    pub(crate) fn load_module(&self, ptx: &CStr) -> Result<Module, DriverError> {
        // SAFETY: PTX is zero-terminated text; the driver checks the rest.
        unsafe { Module::load(self, ptx.as_ptr().cast()) }
    }

    thin! {
        /// [`Function::launch`] on a raw stream, with one pointer to each parameter's value.
        ///
        /// # Safety
        /// As for [`Function::launch`]; `stream` must be valid as for [`Entered::record`].
        pub unsafe fn launch(
            &self, function: &Function, grid: [u32; 3], block: [u32; 3], shared_bytes: u32, stream: CUstream,
            parameters: &mut [*mut c_void]
        ) = cuLaunchKernel(
            function.raw, grid[0], grid[1], grid[2], block[0], block[1], block[2], shared_bytes, stream,
            parameters.as_mut_ptr(), ptr::null_mut()
        );

        /// Calls `function(data)` on a thread of the driver when all earlier work on `stream` has completed. `stream`
        /// must be valid as for [`Entered::record`]; `data` must be valid for `function`, which must not unwind and
        /// must not call the driver.
        pub unsafe fn launch_host(&self,
            stream: CUstream, function: unsafe extern "C" fn(*mut c_void), data: *mut c_void
        ) = cuLaunchHostFunc(stream, Some(function), data);
    }
}
