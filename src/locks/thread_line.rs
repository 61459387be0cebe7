//! One cache line of each thread, for what its calls look at first.
//!
//! In a shared library a thread-local variable of the standard library costs a call of `__tls_get_addr`, which reads
//! several cache lines on its way, and each variable has its own. On x86-64 Linux this line is a variable of ours that a
//! TLS descriptor leads to: a call of two instructions where the line lies at the same distance from every thread's
//! pointer, as in all libraries that a program is linked with, and a constant in a program that the linker sees whole.
//! A Rust library that is linked at run time has one, and the code of ours that is inlined into what uses it has another:
//! what is on a line is a hint, which another line may be without. Elsewhere it is one of the standard library's. Descriptors are described by Oliva and Araujo, "Speeding Up
//! Thread-Local Storage Access in Dynamic Libraries", 2006.

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
    /// The variable is defined wherever it is used, and the linker makes one of all those in a library or program: this
    /// function is inlined into other crates, and those may be linked apart from this one.
    #[inline(always)]
    #[allow(named_asm_labels)] // defined once in what is assembled at a time, however often this is inlined there
    fn distance() -> usize {
        let distance;
        // SAFETY: the sequence that the ABI has for a thread-local variable by its descriptor. It changes `rax` and
        // flags; of older C libraries the registers for vectors, too, the first time that a thread comes here. All of
        // these are named: functions for processors with AVX-512 may be where this is inlined.
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
                ".endif",
                "leaq cualloc_thread_line_{build}@tlsdesc(%rip), %rax",
                "call *cualloc_thread_line_{build}@tlscall(%rax)",
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
