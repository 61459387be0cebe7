//! What an exchange format says of a column.

use crate::driver::sys;

use crate::element::ElementType;
use crate::error::ImportFault;

/// What a column needs to know about what is imported.
pub(super) struct Described {
    pub ptr: sys::CUdeviceptr,
    pub rows: usize,
    pub bytes: usize,
    pub element: ElementType,
    pub read_only: bool,
}

/// Checks rows, address and offset (`shown` as the structure has it; none: a valid one cannot be
/// computed), and gives the first element's address.
pub(super) fn place(
    element: ElementType,
    rows: i64,
    data: u64,
    shown: u64,
    offset: Option<u64>,
) -> Result<(usize, sys::CUdeviceptr), ImportFault> {
    let count = usize::try_from(rows).map_err(|_| ImportFault::Rows { rows })?;
    let bytes = element.bytes_of(count).ok_or(ImportFault::Rows { rows })?;
    let size = element.bytes();
    let offset = offset
        .filter(|offset| offset.is_multiple_of(size as u64))
        .ok_or(ImportFault::Offset { offset: shown })?;
    if data == 0 {
        return match count {
            0 => Ok((0, 0)),
            rows => Err(ImportFault::NoData { rows }),
        };
    }
    let address = data
        .checked_add(offset)
        .ok_or(ImportFault::Offset { offset: shown })?;
    if !address.is_multiple_of(size as u64) {
        return Err(ImportFault::Alignment {
            address,
            alignment: size,
        });
    }
    if address.checked_add(bytes as u64).is_none() {
        return Err(ImportFault::Overflow { address, bytes });
    }
    Ok((count, address))
}
