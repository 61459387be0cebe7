//! The tool attached to the process by NVTX's own variable, and the events it gets.

use std::collections::BTreeMap;
use std::ffi::{CString, OsString, c_char, c_int, c_void};
use std::ptr;
use std::sync::atomic::Ordering;

use libloading::Library;

use super::abi::{self, Domain, Handle, Memory};
use crate::environment;
use crate::locks::held::{Locked, Mutex};

/// The variable by which a tool is loaded.
pub(super) const VARIABLE: &str = "NVTX_INJECTION64_PATH";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Category {
    /// Memory is obtained from the driver.
    Grow = 1,
    /// A view is created.
    Stitch = 2,
    /// The host waits for the device.
    Wait = 3,
    /// Memory is returned to the driver.
    Trim = 4,
    /// A request failed for lack of memory.
    OutOfMemory = 5,
}

impl Category {
    const ALL: [Category; 5] = [
        Category::Grow,
        Category::Stitch,
        Category::Wait,
        Category::Trim,
        Category::OutOfMemory,
    ];

    fn name(self) -> &'static std::ffi::CStr {
        match self {
            Category::Grow => c"grow",
            Category::Stitch => c"stitch",
            Category::Wait => c"wait",
            Category::Trim => c"trim",
            Category::OutOfMemory => c"oom",
        }
    }
}

#[derive(Debug)]
pub(crate) struct Tool {
    /// The domain of all events, null if the tool does not create domains.
    domain: usize,
    /// Heaps by address: their size, and the tool's handle.
    heaps: Mutex<BTreeMap<u64, (u64, usize)>>,
}

unsafe extern "C" fn export(table: u32) -> *const c_void {
    static CALLBACKS: abi::Callbacks = abi::Callbacks {
        bytes: size_of::<abi::Callbacks>(),
        table: module,
    };
    static VERSION: abi::Version = abi::Version {
        bytes: size_of::<abi::Version>(),
        version: abi::VERSION as u32,
        reserved: 0,
        told: ignore,
    };
    match table {
        abi::CALLBACKS => ptr::from_ref(&CALLBACKS).cast(),
        abi::VERSION_INFO => ptr::from_ref(&VERSION).cast(),
        _ => ptr::null(),
    }
}

unsafe extern "C" fn ignore(_: u32) {}

/// The function table in the tool's format: pointers to words, terminated by null.
struct Places([*mut usize; abi::DOMAIN_FUNCTIONS + 1]);

// SAFETY: the pointers never change, and refer to atomics, which any thread may write.
unsafe impl Sync for Places {}

static PLACES: Places = Places({
    let mut places = [ptr::null_mut(); abi::DOMAIN_FUNCTIONS + 1];
    let mut at = 1;
    while at < abi::DOMAIN_FUNCTIONS {
        places[at] = abi::DOMAIN_WORDS[at].as_ptr();
        at += 1;
    }
    places
});

/// Returns the function table of a module; only that of domains is used here.
unsafe extern "C" fn module(
    module: c_int,
    table: *mut *const *mut usize,
    count: *mut u32,
) -> c_int {
    if module != abi::DOMAINS {
        return 0;
    }
    // SAFETY: the tool passes places for both results, or null for those that it does not want.
    unsafe {
        if let Some(table) = table.as_mut() {
            *table = PLACES.0.as_ptr();
        }
        if let Some(count) = count.as_mut() {
            *count = abi::DOMAIN_FUNCTIONS as u32;
        }
    }
    1
}

impl Tool {
    /// Loads the tool named by the environment; none if it names none, or if the library does not export NVTX's
    /// function.
    pub(super) fn load() -> Result<Option<Tool>, libloading::Error> {
        match environment::variable(VARIABLE).filter(|path| !path.is_empty()) {
            Some(path) => Tool::open(&path),
            None => Ok(None),
        }
    }

    fn open(path: &OsString) -> Result<Option<Tool>, libloading::Error> {
        // SAFETY: the user who set the variable is responsible for the library, as for any program with NVTX in it.
        let library = unsafe { Library::new(path) }?;
        // SAFETY: NVTX says what the functions of these names are.
        let core =
            unsafe { library.get::<abi::Attach>(c"InitializeInjectionNvtx2".to_bytes_with_nul()) };
        // A tool may support domains, or memory, or both.
        let core = core.map(|attach| *attach);
        // SAFETY: as above.
        let memory = unsafe {
            library.get::<abi::AttachExtension>(
                c"InitializeInjectionNvtxExtension".to_bytes_with_nul(),
            )
        };
        let memory = memory.map(|attach| *attach);
        if let (Err(_), Err(_)) = (&core, &memory) {
            return Ok(None);
        }
        // The tool is never unloaded: it may have threads, and its functions are called from here on.
        std::mem::forget(library);
        // SAFETY: the function is called once here, with a function that lives as long as the process.
        let domains = core.is_ok_and(|attach| unsafe { attach(export) } != 0);
        if let Ok(attach) = memory
            && !attach_memory(attach)
        {
            abi::MEMORY_WORDS
                .iter()
                .for_each(|word| word.store(0, Ordering::Release));
        }
        let mut tool = Tool {
            domain: 0,
            heaps: Mutex::default(),
        };
        if domains {
            tool.make_domain();
        }
        let listens = tool.tracks_memory() || tool.domain != 0;
        Ok(listens.then_some(tool))
    }

    /// Whether the tool supports heaps and regions.
    pub(crate) fn tracks_memory(&self) -> bool {
        Memory::register_heap().is_some() && Memory::register_regions().is_some()
    }

    fn make_domain(&mut self) {
        let Some(create) = Domain::create() else {
            return;
        };
        // SAFETY: the name is a text that ends with a zero.
        self.domain = unsafe { create(c"cualloc".as_ptr()) }.expose_provenance();
        if let Some(name) = Domain::name_category() {
            for category in Category::ALL {
                // SAFETY: the domain was made by this tool, and the name ends with a zero.
                unsafe { name(self.domain(), category as u32, category.name().as_ptr()) };
            }
        }
    }

    fn domain(&self) -> Handle {
        ptr::with_exposed_provenance_mut(self.domain)
    }

    fn heaps(&self) -> Locked<'_, BTreeMap<u64, (u64, usize)>> {
        self.heaps.lock()
    }

    /// Reports memory from which blocks will be allocated.
    pub(crate) fn heap(&self, at: u64, bytes: u64) {
        let Some(register) = Memory::register_heap() else {
            return;
        };
        let range = range(at, bytes);
        let heap = abi::HeapDescription {
            compatible: abi::COMPATIBLE,
            bytes: size_of::<abi::HeapDescription>() as u16,
            reserved: 0,
            usage: abi::SUBALLOCATOR,
            memory: abi::BY_ADDRESS,
            range_bytes: size_of::<abi::Range>(),
            range: &range,
            category: 0,
            text_type: abi::TEXT,
            text: c"cualloc".as_ptr(),
        };
        // SAFETY: what the description points to lives through the call.
        let handle = unsafe { register(self.domain(), &heap) };
        if !handle.is_null() {
            self.heaps().insert(at, (bytes, handle.expose_provenance()));
        }
    }

    /// Reports that the memory at an address is no longer a heap.
    pub(crate) fn remove_heap(&self, at: u64) {
        let Some((_, handle)) = self.heaps().remove(&at) else {
            return;
        };
        if let Some(unregister) = Memory::unregister_heap() {
            // SAFETY: the handle is the tool's, and was registered once.
            unsafe { unregister(self.domain(), ptr::with_exposed_provenance_mut(handle)) };
        }
    }

    /// Reports an allocated block.
    pub(crate) fn born(&self, at: u64, bytes: u64, name: Option<&str>) {
        let Some(register) = Memory::register_regions() else {
            return;
        };
        let heap = self
            .heaps()
            .range(..=at)
            .next_back()
            .map(|(at, heap)| (*at, *heap));
        let inside = heap.filter(|(start, (bytes, _))| at - start < *bytes);
        let Some((_, (_, handle))) = inside else {
            return;
        };
        let range = range(at, bytes);
        let regions = abi::Register {
            compatible: abi::COMPATIBLE,
            bytes: size_of::<abi::Register>() as u16,
            memory: abi::BY_ADDRESS,
            heap: ptr::with_exposed_provenance_mut(handle),
            count: 1,
            element: size_of::<abi::Range>(),
            ranges: &range,
            handles: ptr::null_mut(),
        };
        // SAFETY: what the batch points to lives through the call.
        unsafe { register(self.domain(), &regions) };
        if let Some(name) = name {
            self.name(at, name);
        }
    }

    /// Reports the name of a block.
    pub(crate) fn name(&self, at: u64, name: &str) {
        let Some(rename) = Memory::name_regions() else {
            return;
        };
        let text = text(name);
        let element = abi::Name {
            by: abi::BY_ADDRESS,
            text_type: abi::TEXT,
            region: ptr::without_provenance(at as usize),
            text: text.as_ptr(),
            category: 0,
            reserved: 0,
        };
        let names = abi::Names {
            compatible: abi::COMPATIBLE,
            bytes: size_of::<abi::Names>() as u16,
            reserved: 0,
            count: 1,
            element: size_of::<abi::Name>(),
            names: &element,
            reserved_end: 0,
        };
        // SAFETY: what the batch points to lives through the call.
        unsafe { rename(self.domain(), &names) };
    }

    pub(crate) fn gone(&self, at: u64) {
        let Some(unregister) = Memory::unregister_regions() else {
            return;
        };
        let region: *const c_void = ptr::without_provenance(at as usize);
        let regions = abi::Unregister {
            compatible: abi::COMPATIBLE,
            bytes: size_of::<abi::Unregister>() as u16,
            by: abi::BY_ADDRESS,
            count: 1,
            element: size_of::<*const c_void>(),
            regions: &region,
        };
        // SAFETY: what the batch points to lives through the call.
        unsafe { unregister(self.domain(), &regions) };
    }

    pub(crate) fn mark(&self, category: Category, what: &str) {
        if let Some(mark) = Domain::mark() {
            let text = text(what);
            let attributes = attributes(category, text.as_ptr());
            // SAFETY: what the attributes point to lives through the call.
            unsafe { mark(self.domain(), &attributes) };
        }
    }

    /// Begins a range on this thread; [`pop`](Self::pop) ends it.
    pub(crate) fn push(&self, category: Category, what: &str) {
        if let Some(push) = Domain::push() {
            let text = text(what);
            let attributes = attributes(category, text.as_ptr());
            // SAFETY: what the attributes point to lives through the call.
            unsafe { push(self.domain(), &attributes) };
        }
    }

    pub(crate) fn pop(&self) {
        if let Some(pop) = Domain::pop() {
            // SAFETY: the function takes only the domain.
            unsafe { pop(self.domain()) };
        }
    }
}

/// Lets a tool set its functions of the memory extension; returns whether it did.
fn attach_memory(attach: abi::AttachExtension) -> bool {
    let mut segment = abi::Segment {
        number: 1,
        slots: abi::SLOTS,
        functions: abi::MEMORY_WORDS[0].as_ptr(),
    };
    let mut module = abi::Module {
        version: abi::VERSION,
        bytes: size_of::<abi::Module>() as u16,
        module: abi::MEMORY,
        compatible: abi::COMPATIBLE,
        segments: 1,
        first: &mut segment,
        export: 0,
        info: 0,
    };
    // SAFETY: the values that the module points to live until the call returns, and the places for functions are
    // statics.
    unsafe { attach(&mut module) != 0 }
}

fn range(at: u64, bytes: u64) -> abi::Range {
    abi::Range {
        bytes: bytes as usize,
        at: ptr::without_provenance(at as usize),
    }
}

/// Converts a text for C: up to the first zero.
fn text(text: &str) -> CString {
    let end = text.find('\0').unwrap_or(text.len());
    CString::new(&text[..end]).unwrap_or_default()
}

fn attributes(category: Category, text: *const c_char) -> abi::Attributes {
    abi::Attributes {
        version: abi::VERSION,
        bytes: size_of::<abi::Attributes>() as u16,
        category: category as u32,
        color_type: 0,
        color: 0,
        payload_type: 0,
        reserved: 0,
        payload: 0,
        text_type: abi::TEXT as i32,
        text,
    }
}
