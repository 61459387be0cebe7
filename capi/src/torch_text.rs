//! Out-of-memory errors in PyTorch's wording.

use std::fmt;

use cualloc::error::OutOfMemory;

/// Formats a size as PyTorch does.
struct Size(u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut size = self.0 as f64;
        if self.0 <= 1024 {
            return write!(f, "{} bytes", self.0);
        }
        for unit in ["KiB", "MiB"] {
            size /= 1024.0;
            if size <= 1024.0 {
                return write!(f, "{size:.2} {unit}");
            }
        }
        write!(f, "{:.2} GiB", size / 1024.0)
    }
}

/// Writes an out-of-memory error in PyTorch's wording, which programs and people search for, followed by the report.
pub(crate) fn write(picture: &OutOfMemory, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let (asked, device) = (Size(picture.requested), picture.device);
    if picture.requested >= 1 << 60 {
        return f.write_str("CUDA out of memory. Tried to allocate more than 1EB memory.");
    }
    write!(
        f,
        "CUDA out of memory. Tried to allocate {asked}. GPU {device}"
    )?;
    if let (Some(total), Some(free)) = (picture.driver_total, picture.driver_free) {
        let (total, free) = (Size(total), Size(free));
        write!(
            f,
            " has a total capacity of {total} of which {free} is free"
        )?;
    }
    if let Some(limit) = picture.limit {
        write!(f, "; {} allowed", Size(limit))?;
    }
    if let Some(others) = picture.others().filter(|others| *others > 0) {
        let others = Size(others);
        write!(
            f,
            ". Others hold {others}: other processes, other allocators of this one, and CUDA itself"
        )?;
    }
    if picture.graph_pools > 0 {
        let pools = Size(picture.graph_pools);
        write!(f, ". {pools} is held by pools of CUDA graphs and tags")?;
    }
    write!(
        f,
        ". Of the allocated memory {} is allocated by PyTorch, and {} is reserved by PyTorch but unallocated.\n{}",
        Size(picture.live()),
        Size(picture.cached),
        picture.report()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_written_as_pytorch_does() {
        let written: Vec<String> = [512, 1024, 1025, 1 << 20, 3 << 29, 5 << 29]
            .map(|bytes| Size(bytes).to_string())
            .into();
        assert_eq!(
            written,
            [
                "512 bytes",
                "1024 bytes",
                "1.00 KiB",
                "1024.00 KiB",
                "1.50 GiB",
                "2.50 GiB"
            ]
        );
    }
}
