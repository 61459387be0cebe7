//! Memory of cualloc as slices of cudarc: allocated on a stream of cudarc, used by its copies and kernels, and freed in
//! the order of the stream. Needs a GPU:
//!
//! ```text
//! cargo run --manifest-path examples/cudarc/Cargo.toml
//! ```

use std::error::Error;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use cualloc::driver::{Context, Driver, Stream};
use cualloc::{Allocator, Block, Config};
use cudarc::driver::{
    CudaContext, CudaSlice, CudaStream, DeviceRepr, LaunchConfig, PushKernelArg, ValidAsZeroBits,
};
use cudarc::nvrtc::Ptx;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const LEN: u32 = 1_000_003;

/// `y[i] = a * x[i] + y[i]` for `n` elements.
const SAXPY: &str = "
.version 7.0
.target sm_52
.address_size 64

.visible .entry saxpy(.param .u64 y, .param .u64 x, .param .f32 a, .param .u32 n)
{
    .reg .pred %p<2>;
    .reg .f32 %f<4>;
    .reg .b32 %r<6>;
    .reg .b64 %rd<6>;

    ld.param.u64 %rd1, [y];
    ld.param.u64 %rd2, [x];
    ld.param.f32 %f1, [a];
    ld.param.u32 %r1, [n];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p1, %r5, %r1;
    @%p1 bra DONE;
    cvta.to.global.u64 %rd1, %rd1;
    cvta.to.global.u64 %rd2, %rd2;
    mul.wide.u32 %rd3, %r5, 4;
    add.s64 %rd4, %rd1, %rd3;
    add.s64 %rd5, %rd2, %rd3;
    ld.global.f32 %f2, [%rd5];
    ld.global.f32 %f3, [%rd4];
    fma.rn.f32 %f3, %f1, %f2, %f3;
    st.global.f32 [%rd4], %f3;
DONE:
    ret;
}
";

/// A stream of cudarc with memory of cualloc.
struct Lane {
    allocator: Allocator,
    cudarc: Arc<CudaStream>,
    /// The same stream for cualloc.
    stream: Stream,
}

impl Lane {
    fn new(allocator: &Allocator, context: &Context, cudarc: Arc<CudaStream>) -> Result<Lane> {
        let raw = cudarc.cu_stream().cast();
        // SAFETY: the stream is alive as long as cudarc's object, and is no default stream, since `new_stream` made it.
        let stream = unsafe { Stream::from_raw_with_owner(context, raw, cudarc.clone()) }?;
        Ok(Lane {
            allocator: allocator.clone(),
            cudarc,
            stream,
        })
    }

    fn zeroed<T: DeviceRepr + ValidAsZeroBits>(&self, len: usize) -> Result<Slice<'_, T>> {
        let block = self
            .allocator
            .allocate(len * size_of::<T>(), &self.stream)?;
        // SAFETY: the block has room for the elements and lives as long as the slice, which is zeroed below.
        let slice = unsafe { self.cudarc.upgrade_device_ptr(block.ptr(), len) };
        let mut slice = Slice {
            slice: ManuallyDrop::new(slice),
            _block: block,
            _lane: self,
        };
        self.cudarc.memset_zeros(&mut *slice)?;
        Ok(slice)
    }
}

/// The allocator keeps a stream that it knows. Retired, the stream ends with cudarc's last reference.
impl Drop for Lane {
    fn drop(&mut self) {
        if let Err(error) = self.allocator.retire(&self.stream) {
            eprintln!("the stream is kept: {error}");
        }
    }
}

/// A slice of cudarc over a block of cualloc. It borrows its lane, since a retired stream gets no more work.
struct Slice<'a, T> {
    slice: ManuallyDrop<CudaSlice<T>>,
    _block: Block,
    _lane: &'a Lane,
}

impl<T> Deref for Slice<'_, T> {
    type Target = CudaSlice<T>;

    fn deref(&self) -> &CudaSlice<T> {
        &self.slice
    }
}

impl<T> DerefMut for Slice<'_, T> {
    fn deref_mut(&mut self) -> &mut CudaSlice<T> {
        &mut self.slice
    }
}

impl<T> Drop for Slice<'_, T> {
    fn drop(&mut self) {
        // SAFETY: the slice is not used again.
        let slice = unsafe { ManuallyDrop::take(&mut self.slice) };
        // The block frees the memory, not cudarc. This makes the stream wait for cudarc's other streams, so that the
        // block's free comes after all uses.
        slice.leak();
    }
}

fn main() -> Result<()> {
    let driver = Driver::load()?;
    let cudarc = CudaContext::new(0)?;
    // SAFETY: the context is alive as long as cudarc's object.
    let context =
        unsafe { Context::from_raw_with_owner(&driver, cudarc.cu_ctx().cast(), cudarc.clone()) }?;
    let allocator = Allocator::with_config(&context, Config::from_env()?)?;
    let module = cudarc.load_module(Ptx::from_src(SAXPY))?;
    let saxpy = module.load_function("saxpy")?;

    let host: Vec<f32> = (0..LEN).map(|i| i as f32).collect();
    let (first, second) = (cudarc.new_stream()?, cudarc.new_stream()?);
    let first = Lane::new(&allocator, &context, first)?;
    let mut x = first.zeroed::<f32>(host.len())?;
    first.cudarc.memcpy_htod(&host, &mut *x)?;
    for round in 1..=3 {
        let mut y = first.zeroed::<f32>(host.len())?;
        // A kernel on another stream, which cudarc orders by events.
        let mut launch = second.launch_builder(&saxpy);
        let a = 2.0f32;
        launch.arg(&mut *y).arg(&*x).arg(&a).arg(&LEN);
        // SAFETY: the kernel has these parameters, and stays within the slices.
        unsafe { launch.launch(LaunchConfig::for_num_elems(LEN)) }?;
        let sums = first.cudarc.clone_dtoh(&*y)?;
        let wrong = (0..LEN).find(|i| sums[*i as usize] != 2.0 * *i as f32);
        if let Some(index) = wrong {
            let found = sums[index as usize];
            return Err(format!("round {round}: element {index} is {found}").into());
        }
    }
    drop(x);
    drop(first);
    let stats = allocator.stats();
    if stats.all.allocated.current != 0 || stats.hits < 2 {
        return Err(format!("memory was not reused or not freed: {stats}").into());
    }
    allocator.close()?;
    println!("cudarc: {LEN} elements correct");
    Ok(())
}
