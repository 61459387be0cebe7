//! What is in a column: filled and copied in the order of its stream.

use crate::buffer::{CHUNK, Staging, end_of, keep};
use crate::error::{Error, InvalidArgument};
use crate::resource::Access;

use super::columns::Column;
use crate::element::Element;

impl Column {
    pub(super) fn set_zero(&self) -> Result<(), Error> {
        if self.byte_len() == 0 {
            return Ok(());
        }
        let stream = self.stream();
        self.memory.prepare(Access::Write)?;
        let entered = stream.context().enter()?;
        // SAFETY: the memory is the column's, and the stream its home.
        let filled = unsafe { entered.memset_d8(self.ptr(), 0, self.byte_len(), stream.raw()) };
        drop(entered);
        let finished = self.memory.finish(Access::Write);
        filled.map_err(Error::from).and(finished)
    }

    /// Overwrites all elements, in the order of the column's stream. Waits until that is done, and until
    /// other columns of the same memory have done theirs.
    ///
    /// # Errors
    /// [`InvalidArgument::DType`], [`InvalidArgument::Length`], [`Error::ReadOnly`],
    /// [`Error::Capturing`], [`Error::Stream`] (of a per-thread default stream on any
    /// thread but the one that made the column), driver errors.
    pub fn copy_from_slice<T: Element>(&mut self, values: &[T]) -> Result<(), Error> {
        self.expect::<T>(values.len())?;
        if self.is_read_only() {
            return Err(Error::ReadOnly);
        }
        if values.is_empty() {
            return Ok(());
        }
        let _turn = self.memory.begin()?;
        self.memory.prepare(Access::Write)?;
        let copied = self.copy_in(values);
        // Also after a failure: the driver may have taken a part.
        let finished = self.memory.finish(Access::Write);
        copied.and(finished)
    }

    /// Copies as many values as the column has rows.
    fn copy_in<T: Element>(&self, values: &[T]) -> Result<(), Error> {
        let (bytes, stream) = (self.byte_len(), self.stream());
        let mut staging = Staging::new(bytes.min(CHUNK))?;
        for start in (0..bytes).step_by(CHUNK) {
            let part = CHUNK.min(bytes - start);
            let (from, to) = (staging.ptr(), self.ptr() + start as u64);
            // SAFETY: so many bytes of the slice, whose elements have no padding, and room for them.
            unsafe {
                let source = values.as_ptr().cast::<u8>().add(start);
                from.copy_from_nonoverlapping(source, part);
            }
            let entered = stream.context().enter()?;
            // SAFETY: the bytes lie in the column's memory; the staging memory is kept until the copy
            // is over.
            let copied =
                unsafe { entered.copy_host_to_device(to, from.cast(), part, stream.raw()) };
            staging = keep(
                staging,
                end_of(stream, copied.map_err(Error::from), self.memory.events()),
            )?;
        }
        Ok(())
    }

    /// All elements, after everything that the column's stream was given so far. Waits.
    ///
    /// # Errors
    /// As [`copy_from_slice`](Self::copy_from_slice).
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>, Error> {
        self.expect::<T>(self.rows())?;
        let mut bytes = vec![0u8; self.byte_len()];
        if bytes.is_empty() {
            return Ok(Vec::new());
        }
        let stream = self.stream();
        let _turn = self.memory.begin()?;
        self.memory.prepare(Access::Read)?;
        let entered = stream.context().enter()?;
        // SAFETY: both ranges have so many bytes; the host's is ours, and kept until the copy is over.
        let copied = unsafe {
            entered.copy_device_to_host(
                bytes.as_mut_ptr().cast(),
                self.ptr(),
                bytes.len(),
                stream.raw(),
            )
        };
        bytes = keep(
            bytes,
            end_of(stream, copied.map_err(Error::from), self.memory.events()),
        )?;
        Ok(bytes
            .chunks_exact(size_of::<T>())
            .map(T::from_device)
            .collect())
    }

    fn expect<T: Element>(&self, rows: usize) -> Result<(), Error> {
        if T::TYPE != self.element_type() {
            return Err(Error::Invalid(InvalidArgument::DType {
                expected: T::TYPE,
                found: self.element_type(),
            }));
        }
        if rows != self.rows() {
            return Err(Error::Invalid(InvalidArgument::Length {
                expected: self.rows(),
                found: rows,
            }));
        }
        Ok(())
    }
}
