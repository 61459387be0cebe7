//! One cache line of each thread, for what its calls look at first.
//!
//! In a shared library a thread-local variable of the standard library costs a call of `__tls_get_addr`, which reads
//! several cache lines on its way, and each variable has its own. On x86-64 Linux this line is a variable of ours that a
//! TLS descriptor leads to: a constant in a program that the linker sees whole, and a call of two instructions where the
//! line lies at the same distance from every thread's pointer, as in all libraries that a program is linked with, and in
//! those that are opened at run time as long as the loader has room. Their distance is looked up once. A Rust library that
//! is linked at run time has one line, and the code of ours that is inlined into what uses it has another: what is on a line
//! is a hint, which another line may be without. Elsewhere it is a variable of the standard library's. Descriptors are
//! described by Oliva and Araujo, "Speeding Up Thread-Local Storage Access in Dynamic Libraries", 2006.

use std::ptr;

/// Pairs of a number and what it stands for that a line has.
pub(crate) const PAIRS: usize = 3;

/// What the C library keeps for the calling thread, null at first; only that library sets it.
#[inline(always)]
pub fn of_caller() -> *const () {
    imp::load::<0>()
}

/// Sets what [`of_caller`] gives where both are called from one library.
#[inline(always)]
pub fn set_of_caller(pointer: *const ()) {
    imp::store::<0>(pointer);
}

/// The first pair of the calling thread, 0 and null at first.
#[inline(always)]
pub(crate) fn first() -> (usize, *const ()) {
    (imp::load::<1>().addr(), imp::load::<2>())
}

/// Whether there is a second pair.
#[inline(always)]
pub(crate) fn has_more() -> bool {
    !imp::load::<3>().is_null()
}

/// All pairs of the calling thread, 0 and null at first.
#[inline(always)]
pub(crate) fn pairs() -> [(usize, *const ()); PAIRS] {
    [
        first(),
        (imp::load::<3>().addr(), imp::load::<4>()),
        (imp::load::<5>().addr(), imp::load::<6>()),
    ]
}

/// Looks for a shorter way to the line: for calls that are rare.
#[inline]
pub(crate) fn learn() {
    imp::learn();
}

/// Sets all pairs.
#[inline(always)]
pub(crate) fn set_pairs(pairs: [(usize, *const ()); PAIRS]) {
    let [first, second, third] = pairs;
    imp::store::<1>(ptr::without_provenance(first.0));
    imp::store::<2>(first.1);
    imp::store::<3>(ptr::without_provenance(second.0));
    imp::store::<4>(second.1);
    imp::store::<5>(ptr::without_provenance(third.0));
    imp::store::<6>(third.1);
}

/// What the thread touched last, null at first: for the processor's sake alone.
#[inline(always)]
pub(crate) fn touched() -> *const () {
    imp::load::<7>()
}

/// Sets what [`touched`] gives.
#[inline(always)]
pub(crate) fn set_touched(pointer: *const ()) {
    imp::store::<7>(pointer);
}

#[cfg(all(
    target_arch = "x86_64",
    target_os = "linux",
    target_pointer_width = "64",
    any(target_env = "gnu", target_env = "musl"),
    not(miri)
))]
mod imp {
    use std::arch::asm;
    use std::ptr;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// What the variable's name ends with: of each build of this crate another number, since several may be linked into
    /// one program, and none may meet the addresses of another.
    const BUILD: u64 = {
        // The last folders of the path, which cargo names after all that the build depends on, and not where it was.
        let path = env!("OUT_DIR").as_bytes();
        let (mut number, mut at, mut folders) = (0xcbf2_9ce4_8422_2325_u64, path.len(), 0);
        while at > 0 && folders < 4 {
            at -= 1;
            if path[at] == b'/' {
                folders += 1;
            }
            number = (number ^ path[at] as u64).wrapping_mul(0x0100_0000_01b3);
        }
        number
    };

    /// Where the line is, from the thread's pointer on: the same as long as the thread lives.
    ///
    /// In a program the linker puts the distance, which is negative, in the place of the descriptor's address. In a library
    /// the descriptor's function is called as long as [`learn`] has found nothing better, which stands in a second variable:
    /// the function's code lies in the loader, where nothing else of a call leads.
    ///
    /// The variables are defined wherever they are used, and the linker makes one of all those in a library or program: this
    /// function is inlined into other crates, and those may be linked apart from this one.
    #[inline(always)]
    #[allow(named_asm_labels)] // defined once in what is assembled at a time, however often this is inlined there
    fn distance() -> usize {
        let distance;
        // SAFETY: the sequence that the ABI has for a thread-local variable by its descriptor, behind a look at what is
        // known, which changes nothing about the outcome. It changes `rax` and flags; of older C libraries the registers for
        // vectors, too, the first time that a thread comes here. All of these are named: functions for processors with
        // AVX-512 may be where this is inlined.
        unsafe {
            asm!(
                ".ifndef cualloc_thread_line_{build}",
                ".pushsection .tbss.cualloc_thread_line_{build}, \"awTG\", @nobits, cualloc_thread_line_{build}, comdat",
                ".weak cualloc_thread_line_{build}",
                ".hidden cualloc_thread_line_{build}",
                ".type cualloc_thread_line_{build}, @object",
                ".size cualloc_thread_line_{build}, 64",
                ".p2align 6",
                "cualloc_thread_line_{build}:",
                ".zero 64",
                ".popsection",
                ".pushsection .bss.cualloc_thread_line_{build}_at, \"awG\", @nobits, cualloc_thread_line_{build}, comdat",
                ".weak cualloc_thread_line_{build}_at",
                ".hidden cualloc_thread_line_{build}_at",
                ".type cualloc_thread_line_{build}_at, @object",
                ".size cualloc_thread_line_{build}_at, 8",
                ".p2align 3",
                "cualloc_thread_line_{build}_at:",
                ".zero 8",
                ".popsection",
                ".endif",
                "leaq cualloc_thread_line_{build}@tlsdesc(%rip), %rax",
                "testq %rax, %rax",
                "js 2f",
                "movq cualloc_thread_line_{build}_at(%rip), %rax",
                "testq %rax, %rax",
                "jnz 2f",
                "leaq cualloc_thread_line_{build}@tlsdesc(%rip), %rax",
                "call *cualloc_thread_line_{build}@tlscall(%rax)",
                "2:",
                build = const BUILD,
                out("rax") distance,
                out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
                out("xmm4") _, out("xmm5") _, out("xmm6") _, out("xmm7") _,
                out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _,
                out("xmm12") _, out("xmm13") _, out("xmm14") _, out("xmm15") _,
                out("xmm16") _, out("xmm17") _, out("xmm18") _, out("xmm19") _,
                out("xmm20") _, out("xmm21") _, out("xmm22") _, out("xmm23") _,
                out("xmm24") _, out("xmm25") _, out("xmm26") _, out("xmm27") _,
                out("xmm28") _, out("xmm29") _, out("xmm30") _, out("xmm31") _,
                out("k0") _, out("k1") _, out("k2") _, out("k3") _,
                out("k4") _, out("k5") _, out("k6") _, out("k7") _,
                options(att_syntax, pure, nomem)
            );
        }
        distance
    }

    /// What a descriptor's function is where the distance is the same for all threads, in every C library: it gives the
    /// descriptor's second word.
    const GIVES_SECOND_WORD: [u8; 5] = [0x48, 0x8b, 0x40, 0x08, 0xc3];
    /// What such functions may begin with: a mark for processors that check where calls lead.
    const MARK: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];

    /// Looks whether the distance is the same for all threads.
    #[cold]
    #[inline(never)]
    pub(super) fn learn() {
        // A loader that fills in descriptors when they are needed has filled it in afterwards.
        let distance = distance();
        let (descriptor, known): (*const [usize; 2], *mut usize);
        // SAFETY: the descriptor's address, or the distance itself, and the second variable's address.
        unsafe {
            asm!(
                "leaq cualloc_thread_line_{build}@tlsdesc(%rip), %rax",
                "leaq cualloc_thread_line_{build}_at(%rip), {known}",
                build = const BUILD,
                known = out(reg) known,
                out("rax") descriptor,
                options(att_syntax, pure, nomem, nostack, preserves_flags)
            );
        }
        if (descriptor.addr() as isize) < 0 {
            return;
        }
        // SAFETY: a descriptor has two words, the first of which is the address of a function.
        let [function, second] = unsafe { descriptor.read_volatile() };
        let mut code = ptr::with_exposed_provenance::<u8>(function);
        let is = |code: *const u8, bytes: &[u8]| {
            // SAFETY: bytes of a function, of which no more are looked at once one is another.
            (0..bytes.len()).all(|at| unsafe { code.add(at).read_volatile() } == bytes[at])
        };
        if is(code, &MARK) {
            code = code.wrapping_add(MARK.len());
        }
        if is(code, &GIVES_SECOND_WORD) && second == distance {
            // SAFETY: nobody else writes it but threads that have found the same.
            unsafe { AtomicUsize::from_ptr(known) }.store(distance, Ordering::Relaxed);
        }
    }

    #[inline(always)]
    pub(super) fn load<const WORD: usize>() -> *const () {
        const { assert!(WORD < 8) };
        let word;
        // SAFETY: one of the eight words of the thread's own line.
        unsafe {
            asm!(
                "movq %fs:8*{at}({distance}), {word}",
                at = const WORD,
                distance = in(reg) distance(),
                word = lateout(reg) word,
                options(att_syntax, pure, readonly, nostack, preserves_flags)
            );
        }
        word
    }

    #[inline(always)]
    pub(super) fn store<const WORD: usize>(word: *const ()) {
        const { assert!(WORD < 8) };
        // SAFETY: one of the eight words of the thread's own line, to which nobody has a reference.
        unsafe {
            asm!(
                "movq {word}, %fs:8*{at}({distance})",
                at = const WORD,
                distance = in(reg) distance(),
                word = in(reg) word,
                options(att_syntax, nostack, preserves_flags)
            );
        }
    }
}

#[cfg(not(all(
    target_arch = "x86_64",
    target_os = "linux",
    target_pointer_width = "64",
    any(target_env = "gnu", target_env = "musl"),
    not(miri)
)))]
mod imp {
    use std::cell::Cell;
    use std::ptr;

    #[repr(align(64))]
    struct Line([Cell<*const ()>; 8]);

    thread_local! {
        static LINE: Line = const { Line([const { Cell::new(ptr::null()) }; 8]) };
    }

    pub(super) fn learn() {}

    #[inline(always)]
    pub(super) fn load<const WORD: usize>() -> *const () {
        LINE.with(|line| line.0[WORD].get())
    }

    #[inline(always)]
    pub(super) fn store<const WORD: usize>(word: *const ()) {
        LINE.with(|line| line.0[WORD].set(word));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What [`pairs`] and [`of_caller`] say, as numbers.
    fn words() -> [usize; 7] {
        let [a, b, c] = pairs().map(|(number, pointer)| [number, pointer.addr()]);
        [of_caller().addr(), a[0], a[1], b[0], b[1], c[0], c[1]]
    }

    #[test]
    fn each_thread_has_words_of_its_own() {
        let look = |own: usize| {
            assert_eq!(words(), [0; 7]);
            let pair = |at: usize| (own + at, ptr::without_provenance(own + at + 1));
            set_of_caller(ptr::without_provenance(own));
            set_pairs([pair(1), pair(3), pair(5)]);
            assert_eq!(words(), [0, 1, 2, 3, 4, 5, 6].map(|word| own + word));
            assert_eq!(first(), pair(1));
        };
        let (meet, at_once) = (std::sync::Barrier::new(3), std::sync::Barrier::new(3));
        std::thread::scope(|scope| {
            for own in [100, 200, 300] {
                let (meet, at_once) = (&meet, &at_once);
                scope.spawn(move || {
                    meet.wait();
                    look(own);
                    at_once.wait();
                    assert_eq!(words(), [0, 1, 2, 3, 4, 5, 6].map(|word| own + word));
                });
            }
        });
    }
}
