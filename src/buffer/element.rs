//! The types that may be stored in device memory.

use std::mem::MaybeUninit;

use crate::error::{Error, InvalidArgument};

/// A type whose values are plain bytes and may be copied to and from a device as such.
///
/// Implemented for integers, floating-point numbers, arrays of such types, and [`MaybeUninit`]; with the feature `half`
/// also for its `f16` and `bf16`, and with the feature `bytemuck` for `Plain` of its types. Not implemented for `bool` and
/// `char`, for which not every bit pattern is valid; nor for references and owning types, which are meaningless on a
/// device. A `#[repr(C)]` struct of such fields may implement it.
///
/// ```
/// fn lives_on_a_device<T: cualloc::DeviceCopy>() {}
/// lives_on_a_device::<[f32; 4]>();
/// lives_on_a_device::<std::mem::MaybeUninit<u8>>();
/// ```
/// ```compile_fail,E0277
/// fn lives_on_a_device<T: cualloc::DeviceCopy>() {}
/// lives_on_a_device::<bool>();
/// ```
/// ```compile_fail,E0277
/// fn lives_on_a_device<T: cualloc::DeviceCopy>() {}
/// lives_on_a_device::<char>();
/// ```
/// ```compile_fail,E0277
/// fn lives_on_a_device<T: cualloc::DeviceCopy>() {}
/// lives_on_a_device::<&'static u32>();
/// ```
/// ```compile_fail,E0277
/// fn lives_on_a_device<T: cualloc::DeviceCopy>() {}
/// lives_on_a_device::<Vec<u32>>();
/// ```
///
/// # Safety
/// Any bytes that initialise a place of this type form a valid value; padding bytes may be anything. In particular, all
/// zero bytes are a valid value. No value refers to memory or to any other resource.
pub unsafe trait DeviceCopy: Copy + Send + Sync + 'static {}

/// A [`DeviceCopy`] type without padding, so that all of its bytes are initialised. Such memory may be viewed as bytes,
/// or as another type of this kind.
///
/// ```compile_fail,E0277
/// fn has_bytes<T: cualloc::Pod>() {}
/// has_bytes::<std::mem::MaybeUninit<u8>>();
/// ```
///
/// # Safety
/// In addition to the contract of [`DeviceCopy`]: every byte of every value is initialised.
pub unsafe trait Pod: DeviceCopy {}

/// A type that device memory can be filled with: numbers of one and of four bytes.
///
/// ```
/// fn fills<T: cualloc::FillValue>() {}
/// fills::<f32>();
/// ```
/// ```compile_fail,E0277
/// fn fills<T: cualloc::FillValue>() {}
/// fills::<f64>();
/// ```
pub trait FillValue: Pod + sealed::Fill {}

mod sealed {
    /// A fill pattern that the driver supports.
    #[derive(Clone, Copy)]
    pub enum Pattern {
        Byte(u8),
        /// In the host's byte order, which is the device's.
        Word(u32),
    }

    pub trait Fill {
        fn pattern(self) -> Pattern;
    }
}

pub(super) use sealed::Pattern;

macro_rules! plain {
    ($($type:ty)*) => {
        $(
            // SAFETY: a number has no padding, every pattern of its bits is a value, and it refers
            // to nothing.
            unsafe impl DeviceCopy for $type {}
            // SAFETY: as above.
            unsafe impl Pod for $type {}
        )*
    };
}

plain!(u8 u16 u32 u64 u128 usize i8 i16 i32 i64 i128 isize f32 f64);

#[cfg(feature = "half")]
plain!(half::f16 half::bf16);

/// An element of a type that is plain data for the crate `bytemuck`, with the feature `bytemuck`: a
/// [`DeviceCopy`] if any bits are a value of the type ([`AnyBitPattern`](bytemuck::AnyBitPattern)),
/// and a [`Pod`] if it has no padding either ([`bytemuck::Pod`]).
///
/// A wrapper, because the traits of this crate cannot be implemented for all types of `bytemuck` without excluding
/// other implementations. It has the layout of the type, and `bytemuck::TransparentWrapper` converts slices without
/// copies.
///
/// ```
/// # #[cfg(feature = "sim")] {
/// # use cualloc::sim::{SimConfig, Simulator};
/// # use cualloc::{Allocator, Config, DeviceBuffer};
/// use bytemuck::{TransparentWrapper, Zeroable};
/// use cualloc::buffer::Plain;
///
/// #[derive(Clone, Copy, PartialEq, Debug)]
/// #[repr(C)]
/// struct Particle {
///     place: [f32; 3],
///     mass: f32,
/// }
/// // SAFETY: numbers without padding. `#[derive(bytemuck::Pod, bytemuck::Zeroable)]` checks this.
/// unsafe impl Zeroable for Particle {}
/// // SAFETY: as above.
/// unsafe impl bytemuck::Pod for Particle {}
///
/// # let sim = Simulator::new(SimConfig::default())?;
/// # let context = sim.driver()?.context(0)?;
/// # let allocator = Allocator::with_config(&context, Config::new())?;
/// # let stream = allocator.create_stream()?;
/// let particles = [Particle { place: [1.0; 3], mass: 2.0 }; 8];
/// let buffer = DeviceBuffer::from_slice(&allocator, Plain::wrap_slice(&particles), &stream)?;
/// assert_eq!(Plain::peel_slice(&buffer.to_vec()?), particles);
/// # }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[cfg(feature = "bytemuck")]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Plain<T>(pub T);

// SAFETY: the only field is the wrapped value.
#[cfg(feature = "bytemuck")]
unsafe impl<T> bytemuck::TransparentWrapper<T> for Plain<T> {}
// SAFETY: any bits are a value of the type, even if its padding is not initialised; it contains no pointers and no
// interior mutability.
#[cfg(feature = "bytemuck")]
unsafe impl<T: bytemuck::AnyBitPattern + Send + Sync> DeviceCopy for Plain<T> {}
// SAFETY: as above, and the type has no padding.
#[cfg(feature = "bytemuck")]
unsafe impl<T: bytemuck::Pod + Send + Sync> Pod for Plain<T> {}

// SAFETY: an array is its elements back to back, without padding of its own.
unsafe impl<T: DeviceCopy, const N: usize> DeviceCopy for [T; N] {}
// SAFETY: as above.
unsafe impl<T: Pod, const N: usize> Pod for [T; N] {}
// SAFETY: any bytes, initialised or not, are a value of the type.
unsafe impl<T: DeviceCopy> DeviceCopy for MaybeUninit<T> {}

macro_rules! fills {
    ($($type:ty: $pattern:ident($bits:ty);)*) => {
        $(
            impl FillValue for $type {}
            impl sealed::Fill for $type {
                fn pattern(self) -> Pattern {
                    Pattern::$pattern(<$bits>::from_ne_bytes(self.to_ne_bytes()))
                }
            }
        )*
    };
}

fills! {
    u8: Byte(u8);
    i8: Byte(u8);
    u32: Word(u32);
    i32: Word(u32);
    f32: Word(u32);
}

/// Returns the size of `len` elements in bytes; an error if no host or device could hold them.
pub(crate) fn bytes_of<T>(len: usize) -> Result<usize, Error> {
    let element_bytes = size_of::<T>();
    let bytes = len.checked_mul(element_bytes);
    let bytes = bytes.filter(|bytes| isize::try_from(*bytes).is_ok());
    bytes.ok_or_else(|| InvalidArgument::TooLarge { len, element_bytes }.into())
}

pub(super) fn check_aligned<T>(ptr: u64) -> Result<(), Error> {
    let alignment = align_of::<T>();
    match ptr.is_multiple_of(alignment as u64) {
        true => Ok(()),
        false => Err(InvalidArgument::Misaligned { ptr, alignment }.into()),
    }
}
