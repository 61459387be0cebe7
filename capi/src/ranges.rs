//! Growable ranges: addresses that are reserved once, whose memory is committed and decommitted in stream order.

use std::ffi::{c_char, c_void};
use std::ops::Range as Span;
use std::ptr;
use std::sync::Arc;

use cualloc::allocator::{Range, RangeOptions, ReliefHook};
use cualloc::driver::sys::CUstream;
use cualloc::{Allocator, Error};

use crate::entry::{call, call_with, clear_result};
use crate::handle_table::HandleTable;
use crate::results::{Failure, NULL};
use crate::stats::{self, room, write};
use crate::{cualloc_range_t, cualloc_t, handles, tags};

static RANGES: HandleTable<Arc<(Allocator, Range)>> = HandleTable::new(
    0xca15,
    "the handle belongs to no range: it was destroyed or never existed",
);

/// Options of a range. Set struct_size to sizeof(cualloc_range_options_t), and all other fields to 0 unless they are
/// used. Later versions of the library add fields at the end.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct cualloc_range_options_t {
    /// Size of this structure in bytes, as the caller knows it.
    pub struct_size: usize,
    /// Bytes that are committed together: a power of two from 2 MiB to 64 MiB; 0 means 2 MiB.
    pub granule: u64,
    /// Number of equal parts that are committed together; 0 means 1. All sizes, offsets and bits count one stripe.
    pub stripes: u64,
    /// Bytes from the start of one stripe to that of the next, in whole granules; 0 for stripes without a gap.
    pub stripe_stride: u64,
    /// Null, or a zero-terminated text: the tag by which the memory is suspended (CUALLOC_SELECT_TAG), and named in
    /// reports.
    pub tag: *const c_char,
}

/// Sizes of a range in bytes, over all stripes. Set struct_size to sizeof(cualloc_range_stats_t) before the call; the
/// structure grows as cualloc_stats_t does.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct cualloc_range_stats_t {
    /// Size of this structure in bytes, as the caller knows it. Not changed.
    pub struct_size: usize,
    /// Bytes of addresses, with memory or without.
    pub reserved: u64,
    /// Bytes of committed memory.
    pub committed: u64,
    /// Bytes of decommitted memory that has not left the range.
    pub leaving: u64,
    /// Bytes of a granule in one stripe.
    pub granule: u64,
}

/// A function that frees memory which the program can do without. It receives the data of its registration and the
/// number of bytes that a request lacks.
pub type cualloc_pressure_t = Option<unsafe extern "C" fn(data: *mut c_void, bytes: u64)>;

/// Runs a call with a range.
fn with<T>(
    handle: *const cualloc_range_t,
    run: impl FnOnce(&Range) -> Result<T, Error>,
) -> Result<T, Failure> {
    if handle.is_null() {
        return Err(NULL);
    }
    let found = RANGES.with(handle as u64, |found| Arc::clone(found))?;
    let (allocator, range) = &*found;
    run(range).map_err(|error| handles::convert_error(allocator, error))
}

fn span(offset: u64, bytes: u64) -> Span<u64> {
    // Beyond the end of any range if it wraps.
    offset..offset.saturating_add(bytes)
}

/// Reserves addresses for a range of at least bytes per stripe, without memory, and writes its handle to *range and its
/// first address to *base. The allocator cannot be destroyed while the range exists.
///
/// Errors: CUALLOC_OUT_OF_MEMORY if the driver refuses the addresses (the text names their size); CUALLOC_UNSUPPORTED
/// under the classic policy; CUALLOC_INVALID_ARGUMENT for a null handle, range or base, 0 bytes, or an invalid option;
/// CUALLOC_CLOSED; CUALLOC_CONTEXT_LOST; CUALLOC_DRIVER. *range is then null, and *base 0.
///
/// May be called from any thread.
///
/// # Safety
/// `options` is null or points to `struct_size` bytes, with a tag that is null or zero-terminated; `range` and `base` are
/// null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_range_create(
    allocator: *mut cualloc_t,
    bytes: u64,
    options: *const cualloc_range_options_t,
    range: *mut *mut cualloc_range_t,
    base: *mut u64,
) -> i32 {
    call(|| {
        // SAFETY: the caller's contract.
        unsafe { clear_result(range).and(clear_result(base)) }?;
        let mut made = RangeOptions::new();
        if !options.is_null() {
            // SAFETY: the caller's contract.
            let given: cualloc_range_options_t = unsafe { stats::read_struct(options) }?;
            made = made.granule(given.granule);
            made = made.stripes(given.stripes, given.stripe_stride);
            if !given.tag.is_null() {
                // SAFETY: the caller's contract.
                made = made.tag(unsafe { tags::of(given.tag) }?);
            }
        }
        let reserve = |allocator: &Allocator| {
            let range = allocator.reserve_range(bytes, made)?;
            Ok((range.base(), Arc::new((allocator.clone(), range))))
        };
        let (first, made) = handles::with(allocator, reserve)?;
        let handle = RANGES.add(made)?;
        // SAFETY: not null, and the caller's contract.
        unsafe {
            range.write(ptr::without_provenance_mut(handle as usize));
            base.write(first);
        }
        Ok(())
    })
}

/// Gives memory to all granules that overlap bytes from offset on; granules with memory stay as they are. The contents
/// of new memory are undefined. The memory may be used on the stream from here on, and on streams ordered after it.
///
/// Idle memory of the allocator in pieces of the granule's size is used first; the rest comes from the driver. If that
/// is too little, the call makes room as an allocation does. On a stream that is being captured it waits for nothing and
/// calls no callback. If a granule was decommitted and may still be in use, the stream waits for that use on the device.
///
/// Errors: CUALLOC_OUT_OF_MEMORY (the text says how many bytes are missing); CUALLOC_SUSPENDED;
/// CUALLOC_INVALID_ARGUMENT for a null range, bytes beyond its end, or a stream of another device; CUALLOC_CLOSED;
/// CUALLOC_CONTEXT_LOST; CUALLOC_DRIVER. No granule has changed then.
///
/// May be called from any thread.
///
/// # Safety
/// `stream` is live, or null, 1 or 2, and is retired before it is destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_range_commit(
    range: *mut cualloc_range_t,
    offset: u64,
    bytes: u64,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: the caller's contract.
    let commit = |range: &Range| unsafe { range.commit_raw(span(offset, bytes), stream.cast()) };
    call(|| with(range, commit))
}

/// Removes the memory of all granules that lie inside bytes from offset on. Other requests get it once the work
/// submitted so far to the stream, and to the streams named by cualloc_range_record, has ended. It must not be used any
/// more, not even by a graph that was captured before. Granules without memory are ignored.
///
/// Errors: CUALLOC_CAPTURING for a stream that is being captured; otherwise as cualloc_range_commit, without
/// CUALLOC_OUT_OF_MEMORY.
///
/// May be called from any thread.
///
/// # Safety
/// As for cualloc_range_commit.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_range_decommit(
    range: *mut cualloc_range_t,
    offset: u64,
    bytes: u64,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: the caller's contract.
    let decommit =
        |range: &Range| unsafe { range.decommit_raw(span(offset, bytes), stream.cast()) };
    call(|| with(range, decommit))
}

/// Records that another stream uses the granules that overlap bytes from offset on: when they are decommitted, their
/// memory serves other requests only after the work submitted to that stream until then.
///
/// Errors: as cualloc_range_decommit.
///
/// May be called from any thread.
///
/// # Safety
/// As for cualloc_range_commit.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_range_record(
    range: *mut cualloc_range_t,
    offset: u64,
    bytes: u64,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: the caller's contract.
    let record = |range: &Range| unsafe { range.record_raw(span(offset, bytes), stream.cast()) };
    call(|| with(range, record))
}

/// Writes the sizes of a range to *stats, as many fields as its struct_size says.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for a null range or stats, or a struct_size that is not set; CUALLOC_CLOSED;
/// CUALLOC_CONTEXT_LOST. The fields are then 0, if they could be written.
///
/// May be called from any thread.
///
/// # Safety
/// `stats` is null, or points to `struct_size` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_range_stats(
    range: *const cualloc_range_t,
    stats: *mut cualloc_range_stats_t,
) -> i32 {
    call(|| {
        // SAFETY: the caller's contract.
        let room = unsafe { room(stats) }?;
        // SAFETY: as above.
        unsafe { write(&cualloc_range_stats_t::default(), stats, room) };
        let found = with(range, Range::stats)?;
        let figures = cualloc_range_stats_t {
            struct_size: 0,
            reserved: found.reserved,
            committed: found.committed,
            leaving: found.leaving,
            granule: found.granule,
        };
        // SAFETY: as above.
        unsafe { write(&figures, stats, room) };
        Ok(())
    })
}

/// Writes one bit for each granule of a stripe, 1 if it is committed, to the first words of bits: the first granule is
/// the lowest bit of the first word. Further words become 0; granules beyond the words are left out.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for a null range or bits; CUALLOC_CLOSED; CUALLOC_CONTEXT_LOST.
///
/// May be called from any thread.
///
/// # Safety
/// `bits` is null, or points to `words` writable words.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_range_map(
    range: *const cualloc_range_t,
    bits: *mut u64,
    words: usize,
) -> i32 {
    call(|| {
        if bits.is_null() {
            return Err(NULL);
        }
        // SAFETY: the caller's contract.
        unsafe { bits.write_bytes(0, words) };
        let map = with(range, Range::committed_map)?;
        // SAFETY: as above; the map is the library's own.
        unsafe { ptr::copy_nonoverlapping(map.as_ptr(), bits, map.len().min(words)) };
        Ok(())
    })
}

/// Ends a range: decommits all its memory, as cualloc_range_decommit does, and frees its addresses once the memory has
/// left. The handle has ended then. Null is ignored.
///
/// Errors: as cualloc_range_decommit; the range then continues to exist.
///
/// May be called from any thread.
///
/// # Safety
/// As for cualloc_range_commit. No call on another thread uses the range's memory later.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_range_destroy(
    range: *mut cualloc_range_t,
    stream: *mut c_void,
) -> i32 {
    let stream: CUstream = stream.cast();
    call(|| {
        if range.is_null() {
            return Ok(());
        }
        // SAFETY: the caller's contract.
        with(range, |range| unsafe { range.close_raw(stream) })?;
        RANGES.remove(range as u64).map(drop)
    })
}

/// Sets the function that is called, without any lock held, when a request or a commit finds too little memory and no
/// work is left to wait for: it may decommit memory of ranges, and free blocks. Memory that it decommits serves the
/// request that lacked memory as soon as the work that uses it has ended. Requests that the function makes itself do
/// not call it. Null removes it.
///
/// A call of the function that is in progress on another thread may end after it was replaced or removed.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for a null handle; CUALLOC_CLOSED; CUALLOC_CONTEXT_LOST in a forked child.
///
/// May be called from any thread.
///
/// # Safety
/// The function may be called with the data from any thread until it was removed, or the allocator destroyed. It must
/// not throw.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_on_pressure(
    allocator: *mut cualloc_t,
    callback: cualloc_pressure_t,
    data: *mut c_void,
) -> i32 {
    /// The data of a caller.
    struct Data(*mut c_void);
    // SAFETY: the caller lets any thread call the function with the data.
    unsafe impl Send for Data {}
    // SAFETY: as above.
    unsafe impl Sync for Data {}
    impl Data {
        fn get(&self) -> *mut c_void {
            self.0
        }
    }
    const NAME: &str = "cualloc_on_pressure";
    let data = Data(data);
    call_with(allocator, |allocator| {
        handles::refuse_child(allocator)?;
        match callback {
            None => allocator.remove_relief_hook(NAME),
            Some(callback) => allocator.add_relief_hook(ReliefHook::new(NAME, move |bytes| {
                // SAFETY: the caller's contract.
                unsafe { callback(data.get(), bytes) };
                0
            })),
        };
        Ok(())
    })
}
