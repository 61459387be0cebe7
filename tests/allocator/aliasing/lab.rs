//! Memory at two addresses, and kernels that work on it.

use std::ffi::{CStr, c_void};

use super::cases::Case;
use crate::common::prelude::*;
use cualloc::driver::{Device, Function, MemoryProperties, Module};

/// The operation of a kernel on a word; see `words.ptx`.
pub type Words = u32;
pub const STORE: Words = 0;
pub const ADD: Words = 1;
pub const ATOMIC_ADD: Words = 2;
pub const EXCHANGE: Words = 3;
pub const CHECK: Words = 4;
pub const READ_ONLY: Words = 5;
pub const CONSTANT: Words = 6;
/// Pieces of both parities.
pub const ANY: Words = 2;

/// The requirements of a case.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Needs {
    Nothing,
    /// Kernels of this test: a GPU.
    Words,
    /// Bulk copies: a GPU of compute capability 9.0 or later.
    Bulk,
}

/// Bytes for copies out of the memory in question.
const SPARE: usize = 32 * MIB;

pub struct Lab<'a> {
    pub rig: &'a Rig,
    context: Context,
    pub a: Stream,
    pub b: Stream,
    fill: Function,
    check: Function,
    pub words: Option<Function>,
    pub bulk: Option<[Function; 2]>,
    /// Ordinary memory.
    pub spare: u64,
    /// A 32-bit count of wrong words.
    bad: u64,
}

fn text(ptx: &str) -> std::ffi::CString {
    std::ffi::CString::new(ptx).unwrap()
}

fn function(context: &Context, ptx: &CStr, name: &CStr) -> Function {
    let module = Module::from_ptx(context, ptx).unwrap();
    module.function(name).unwrap()
}

impl<'a> Lab<'a> {
    pub fn new(rig: &'a Rig) -> Lab<'a> {
        Lab::in_context(rig, rig.context.clone())
    }

    pub fn in_context(rig: &'a Rig, context: Context) -> Lab<'a> {
        let basic = text(include_str!("../../../src/driver/words.ptx"));
        let (mut words, mut bulk) = (None, None);
        if on_cuda() {
            let own = text(include_str!("words.ptx"));
            words = Some(function(&context, &own, c"alias_words"));
            let major = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR;
            if context.device().attribute(major).unwrap() >= 9 {
                let own = text(include_str!("bulk.ptx"));
                let names = [c"alias_bulk_fill", c"alias_bulk_check"];
                bulk = Some(names.map(|name| function(&context, &own, name)));
            } else {
                eprintln!("SKIPPED in part: no bulk copies before compute capability 9.0");
            }
        } else {
            eprintln!("SKIPPED in part: the simulator runs fills and copies only");
        }
        let (spare, bad) = {
            let entered = context.enter().unwrap();
            let spare = entered.mem_alloc(SPARE).unwrap();
            (spare, entered.mem_alloc(4).unwrap())
        };
        let lab = Lab {
            rig,
            a: Stream::new(&context).unwrap(),
            b: Stream::new(&context).unwrap(),
            fill: function(&context, &basic, c"cualloc_fill"),
            check: function(&context, &basic, c"cualloc_check"),
            words,
            bulk,
            spare,
            bad,
            context,
        };
        lab.take_bad();
        lab
    }

    pub fn can(&self, case: &Case) -> bool {
        match case.needs {
            Needs::Nothing => true,
            Needs::Words => self.words.is_some(),
            Needs::Bulk => self.bulk.is_some(),
        }
    }

    fn launch(&self, kernel: &Function, threads: u32, stream: &Stream, mut p: Parameters) {
        let entered = self.context.enter().unwrap();
        let mut list = p.list();
        // SAFETY: the parameters are those of the kernel; the test keeps the memory until the work
        // is done, and the lab its modules.
        unsafe {
            let (grid, block) = ([264, 1, 1], [threads, 1, 1]);
            entered.launch(kernel, grid, block, 0, stream.raw(), &mut list)
        }
        .unwrap();
    }

    /// Word i becomes `seed + i`.
    pub fn fill(&self, at: u64, bytes: usize, seed: u32, stream: &Stream) {
        let p = Parameters::new(at, bytes, &[seed], None);
        self.launch(&self.fill, 256, stream, p);
    }

    /// Counts words that are not `seed + i`.
    pub fn check(&self, at: u64, bytes: usize, seed: u32, stream: &Stream) {
        let p = Parameters::new(at, bytes, &[seed], Some(self.bad));
        self.launch(&self.check, 256, stream, p);
    }

    pub fn words(&self, mode: Words, parity: u32, at: u64, bytes: usize, v: u32, stream: &Stream) {
        let kernel = self.words.as_ref().expect("only on a GPU");
        let p = Parameters::new(at, bytes, &[v, parity, mode], Some(self.bad));
        self.launch(kernel, 256, stream, p);
    }

    pub fn bulk_fill(&self, parity: u32, at: u64, bytes: usize, v: u32, stream: &Stream) {
        let [fill, _] = self.bulk.as_ref().expect("only on a GPU");
        let p = Parameters::new(at, bytes, &[v, parity], None);
        self.launch(fill, 128, stream, p);
    }

    pub fn bulk_check(&self, parity: u32, at: u64, bytes: usize, v: u32, stream: &Stream) {
        let [_, check] = self.bulk.as_ref().expect("only on a GPU");
        let p = Parameters::new(at, bytes, &[v, parity], Some(self.bad));
        self.launch(check, 128, stream, p);
    }

    pub fn copy(&self, to: u64, from: u64, bytes: usize, stream: &Stream) {
        let entered = self.context.enter().unwrap();
        // SAFETY: the test owns both ranges and keeps them.
        unsafe { entered.copy_device_to_device(to, from, bytes, stream.raw()) }.unwrap();
    }

    /// Orders later work of `after` behind the work of `before` so far.
    pub fn follow(&self, after: &Stream, before: &Stream) {
        let event = before.context().enter().unwrap().create_event().unwrap();
        event.record(before).unwrap();
        after.wait(&event).unwrap();
    }

    pub fn settle(&self) {
        self.a.synchronize().unwrap();
        self.b.synchronize().unwrap();
    }

    /// Returns the number of wrong words so far, and resets it.
    pub fn take_bad(&self) -> u64 {
        let mut bad = 0u32;
        let entered = self.context.enter().unwrap();
        // SAFETY: the count is the lab's, the local is written before it is read.
        unsafe {
            let stream = self.a.raw();
            entered
                .copy_device_to_host((&raw mut bad).cast(), self.bad, 4, stream)
                .unwrap();
            entered.memset_d32(self.bad, 0, 1, stream).unwrap();
        }
        self.a.synchronize().unwrap();
        u64::from(bad)
    }

    pub fn reserve(&self, bytes: usize) -> u64 {
        self.context
            .enter()
            .unwrap()
            .address_reserve(bytes, 0, 0)
            .unwrap()
    }

    pub fn unreserve(&self, at: u64, bytes: usize) {
        // SAFETY: reserved by `reserve`, with nothing mapped in it.
        unsafe { self.context.enter().unwrap().address_free(at, bytes) }.unwrap();
    }

    pub fn hide(&self, at: u64, bytes: usize) {
        // SAFETY: mapped by the test, which has waited for what used it.
        unsafe { self.context.enter().unwrap().mem_unmap(at, bytes) }.unwrap();
    }
}

impl Drop for Lab<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        self.settle();
        let entered = self.context.enter().unwrap();
        for at in [self.spare, self.bad] {
            // SAFETY: allocated by the lab; its streams are done.
            unsafe { entered.mem_free(at) }.unwrap();
        }
    }
}

/// The parameters of one launch: address, number of words, numbers, and where to count.
struct Parameters {
    at: u64,
    words: u64,
    numbers: Vec<u32>,
    bad: Option<u64>,
}

impl Parameters {
    fn new(at: u64, bytes: usize, numbers: &[u32], bad: Option<u64>) -> Parameters {
        Parameters {
            at,
            words: (bytes / 4) as u64,
            numbers: numbers.to_vec(),
            bad,
        }
    }

    fn list(&mut self) -> Vec<*mut c_void> {
        let mut list = vec![(&raw mut self.at).cast(), (&raw mut self.words).cast()];
        list.extend(self.numbers.iter_mut().map(|n| (&raw mut *n).cast()));
        list.extend(self.bad.iter_mut().map(|bad| (&raw mut *bad).cast()));
        list
    }
}

/// One handle, mapped at two addresses.
pub struct Aliased<'a> {
    lab: &'a Lab<'a>,
    handle: u64,
    access: Vec<Device>,
    pub bytes: usize,
    pub at: [u64; 2],
}

impl<'a> Aliased<'a> {
    pub fn new(lab: &'a Lab<'_>, bytes: usize, access: &[Device]) -> Aliased<'a> {
        let entered = lab.context.enter().unwrap();
        let properties = MemoryProperties::for_device(lab.context.device());
        let handle = entered.mem_create(bytes, &properties.unwrap()).unwrap();
        let memory = Aliased {
            lab,
            handle,
            access: access.to_vec(),
            bytes,
            at: [(); 2].map(|()| lab.reserve(bytes)),
        };
        for at in memory.at {
            memory.show(lab, at);
        }
        memory
    }

    /// Maps the memory at one more address.
    pub fn show(&self, lab: &Lab<'_>, at: u64) {
        let entered = lab.context.enter().unwrap();
        // SAFETY: the range is the test's and empty; the handle is alive and of this size.
        unsafe {
            entered.mem_map(at, self.bytes, self.handle).unwrap();
            entered.set_access(at, self.bytes, &self.access).unwrap();
        }
    }
}

impl Drop for Aliased<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        self.lab.settle();
        for at in self.at {
            self.lab.hide(at, self.bytes);
            self.lab.unreserve(at, self.bytes);
        }
        let entered = self.lab.context.enter().unwrap();
        // SAFETY: made by this, and mapped nowhere any more.
        unsafe { entered.mem_release(self.handle) }.unwrap();
    }
}
