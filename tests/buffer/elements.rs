//! Element types of other crates, behind features of the library.

use super::*;
use bytemuck::{AnyBitPattern, TransparentWrapper, Zeroable};
use cualloc::buffer::Plain;
use cualloc::exchange::dlpack::DLManagedTensorVersioned;
use cualloc::exchange::{DType, Dlpack, Element, Peer, Tensor};
use half::{bf16, f16};

/// Any bits are a value of it, but it has padding.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
struct Padded {
    kind: u8,
    value: u32,
}
// SAFETY: two numbers.
unsafe impl Zeroable for Padded {}
// SAFETY: as above.
unsafe impl AnyBitPattern for Padded {}

#[test]
fn types_of_bytemuck_are_elements() {
    Rig::each(|_, alloc, stream| {
        let values = [1, 2, 3].map(|kind| Padded { kind, value: !0 });
        let mut buffer =
            DeviceBuffer::from_slice(alloc, Plain::wrap_slice(&values), stream).unwrap();
        assert_eq!(Plain::peel_slice(&buffer.to_vec().unwrap()), values);
        buffer.slice_mut(1..).unwrap().set_zero(stream).unwrap();
        assert_eq!(buffer.to_vec().unwrap()[2].0, Padded::zeroed());
        // Without padding it has bytes as well.
        let words = DeviceBuffer::from_slice(alloc, &[Plain([1u16, 2]); 4], stream).unwrap();
        assert_eq!(words.into_bytes().to_vec().unwrap()[..4], [1, 0, 2, 0]);
    });
}

fn exchanged<T: Element + PartialEq + std::fmt::Debug>(
    values: [T; 3],
    dtype: DType,
    (alloc, stream): (&Allocator, &Stream),
) {
    let buffer = DeviceBuffer::from_slice(alloc, &values, stream).unwrap();
    let tensor = Tensor::from_buffer(buffer, &[3]).unwrap();
    assert_eq!(tensor.dtype(), dtype);
    let lent: Dlpack<DLManagedTensorVersioned> = tensor.to_dlpack(&Peer::on(stream)).unwrap();
    let back = Tensor::from_dlpack(lent, stream, common::ordered()).unwrap();
    assert_eq!(back.as_slice::<T>().unwrap().to_vec().unwrap(), values);
    // The bits are those of an unsigned integer as before.
    assert_eq!(back.as_slice::<u16>().unwrap().len(), 3);
    assert_matches!(
        back.as_slice::<i16>(),
        Err(Error::Invalid(InvalidArgument::DType { .. }))
    );
}

#[test]
fn halves_are_elements_of_buffers_and_tensors() {
    Rig::each(|_, alloc, stream| {
        let values = [0.5, -2.0, 1024.0];
        exchanged(values.map(f16::from_f32), DType::F16, (alloc, stream));
        exchanged(values.map(bf16::from_f32), DType::BF16, (alloc, stream));
        let halves = DeviceBuffer::<f16>::zeroed(alloc, 2, stream).unwrap();
        let halves = Tensor::from_buffer(halves, &[2]).unwrap();
        assert!(halves.as_slice::<bf16>().is_err());
        assert_eq!(halves.into_buffer::<f16>().unwrap().len(), 2);
    });
}
