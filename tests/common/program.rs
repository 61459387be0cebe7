//! Steps of random programs: plain numbers, which are interpreted modulo the number of existing objects, so that any
//! part of a program is a program.

use super::rng::Rng;

#[derive(Clone, Copy, Debug)]
pub struct Step<A> {
    pub act: A,
    pub a: u32,
    pub b: u32,
    pub c: u32,
}

impl<A: Copy> Step<A> {
    /// A step with one number.
    pub fn of(act: A, a: u32) -> Step<A> {
        Step { act, a, b: 0, c: 0 }
    }

    /// One of these, each as often as its weight says.
    pub fn draw(acts: &[(A, u32)], rng: &mut Rng) -> Step<A> {
        let total: u32 = acts.iter().map(|(_, weight)| weight).sum();
        let mut at = rng.below(total.into()) as u32;
        let found = acts.iter().find(|(_, weight)| {
            let here = at < *weight;
            at = at.wrapping_sub(*weight);
            here
        });
        let &(act, _) = found.expect("a weight that is not 0");
        Step {
            act,
            a: rng.next() as u32,
            b: rng.next() as u32,
            c: rng.next() as u32,
        }
    }

    /// Random numbers of the step's own.
    pub fn rng(&self) -> Rng {
        Rng::new(u64::from(self.a) << 32 ^ u64::from(self.b) << 11 ^ u64::from(self.c))
    }
}
