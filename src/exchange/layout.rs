//! Shapes and strides, and the memory range they cover.

use crate::driver::sys;
use crate::dtype::DType;
use crate::error::{Error, ImportFault, InvalidArgument};

/// The maximum number of dimensions of a tensor.
pub(super) const MAXIMUM: usize = 32;

/// The positions of a tensor's elements relative to the first one.
#[derive(Debug, Clone)]
pub(super) struct Layout {
    pub shape: Box<[usize]>,
    /// Strides in elements.
    pub strides: Box<[isize]>,
}

/// An exchange format's description of a tensor.
pub(super) struct Described {
    pub dtype: DType,
    pub layout: Layout,
    /// The first element.
    pub ptr: sys::CUdeviceptr,
    /// The lowest byte of any element, and the number of bytes from it to the end of the highest.
    pub start: sys::CUdeviceptr,
    pub bytes: usize,
    pub read_only: bool,
    /// Whether it is page-locked host memory.
    pub host: bool,
}

impl Layout {
    /// Creates a contiguous layout with the last dimension fastest. Also returns the size in bytes.
    pub(super) fn compact(dtype: DType, shape: &[usize]) -> Result<(Layout, usize), Error> {
        if shape.len() > MAXIMUM {
            return Err(Error::Invalid(InvalidArgument::Dimensions {
                found: shape.len(),
                most: MAXIMUM,
            }));
        }
        let too_large = Error::Invalid(InvalidArgument::TooLarge {
            len: shape.iter().copied().fold(1, usize::saturating_mul),
            element_bytes: dtype.bytes(),
        });
        let bytes = bytes_of(dtype, shape).map_err(|_| too_large)?;
        let strides = compact_strides(shape);
        let shape = shape.into();
        Ok((Layout { shape, strides }, bytes))
    }

    pub(super) fn len(&self) -> usize {
        // Checked when the layout was made.
        self.shape.iter().product()
    }

    pub(super) fn is_compact(&self) -> bool {
        let compact = compact_strides(&self.shape);
        let mut dimensions = self.shape.iter().zip(self.strides.iter().zip(&compact));
        self.len() == 0 || dimensions.all(|(len, (stride, compact))| *len == 1 || stride == compact)
    }

    /// Checks a foreign description of elements at `data` and `offset` bytes (`shown` as in the structure; none if it
    /// is invalid), so that all of them lie in the address space.
    pub(super) fn described(
        dtype: DType,
        shape: &[i64],
        strides: Option<&[i64]>,
        data: u64,
        (offset, shown): (Option<u64>, u64),
    ) -> Result<Described, ImportFault> {
        let mut lengths = Vec::with_capacity(shape.len());
        for length in shape {
            let fault = ImportFault::Length { length: *length };
            lengths.push(usize::try_from(*length).map_err(|_| fault)?);
        }
        let length = |at| ImportFault::Length { length: shape[at] };
        bytes_of(dtype, &lengths).map_err(length)?;
        let strides: Box<[isize]> = match strides {
            // Both have 64 bits.
            Some(strides) => strides.iter().map(|stride| *stride as isize).collect(),
            None => compact_strides(&lengths),
        };
        let shape = lengths.into_boxed_slice();
        let layout = Layout { shape, strides };
        let size = dtype.bytes() as u64;
        let offset = offset
            .filter(|offset| offset.is_multiple_of(size))
            .ok_or(ImportFault::Offset { offset: shown })?;
        let mut described = Described {
            dtype,
            layout,
            ptr: 0,
            start: 0,
            bytes: 0,
            read_only: false,
            host: false,
        };
        let len = described.layout.len();
        if data == 0 || len == 0 {
            return match len {
                0 => Ok(described),
                elements => Err(ImportFault::NoData { elements }),
            };
        }
        let address = data
            .checked_add(offset)
            .ok_or(ImportFault::Offset { offset: shown })?;
        if !address.is_multiple_of(size) {
            let alignment = dtype.bytes();
            return Err(ImportFault::Alignment { address, alignment });
        }
        (described.start, described.bytes) = described.layout.reach(address, dtype)?;
        described.ptr = address;
        Ok(described)
    }

    /// Returns the lowest byte of the elements, the first of which is at `address`, and the number of bytes up to the
    /// highest.
    fn reach(&self, address: u64, dtype: DType) -> Result<(u64, usize), ImportFault> {
        let size = dtype.bytes() as i128;
        let (mut lowest, mut highest) = (0i128, 0i128);
        for (len, stride) in self.shape.iter().zip(&self.strides) {
            // Each is at most 2^126, and 32 terms that pass are at most 2^69.
            let way = (*len as i128 - 1) * *stride as i128;
            if way.abs() * size > i128::from(i64::MAX) {
                let stride = *stride as i64;
                return Err(ImportFault::Stride { stride });
            }
            lowest += way.min(0);
            highest += way.max(0);
        }
        let start = i128::from(address) + lowest * size;
        let bytes = (highest - lowest + 1) * size;
        match (u64::try_from(start), usize::try_from(bytes)) {
            (Ok(start), Ok(bytes)) if start.checked_add(bytes as u64).is_some() => {
                Ok((start, bytes))
            }
            (_, bytes) => Err(ImportFault::Overflow {
                address,
                bytes: bytes.unwrap_or(usize::MAX),
            }),
        }
    }
}

/// Returns the size of the elements in bytes, or the dimension at which it exceeds any address space.
fn bytes_of(dtype: DType, shape: &[usize]) -> Result<usize, usize> {
    // Checked even if another dimension is empty, so that multiplying the lengths cannot overflow.
    let mut bytes = dtype.bytes();
    for (at, len) in shape.iter().enumerate() {
        bytes = (*len).max(1).checked_mul(bytes).ok_or(at)?;
        isize::try_from(bytes).map_err(|_| at)?;
    }
    Ok(if shape.contains(&0) { 0 } else { bytes })
}

fn compact_strides(shape: &[usize]) -> Box<[isize]> {
    let mut strides: Vec<isize> = Vec::with_capacity(shape.len());
    let mut next = 1;
    for len in shape.iter().rev() {
        strides.push(next);
        // The total size is known to be below `isize::MAX`.
        next *= (*len).max(1) as isize;
    }
    strides.reverse();
    strides.into()
}
