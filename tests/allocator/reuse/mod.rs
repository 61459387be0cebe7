//! When freed memory is reused: on its own stream immediately, on others in order.

mod adopted;
mod at_once;
mod bytes;
mod contexts;
mod independent;
mod late;
mod leaving;
mod markers;
mod names;
mod order;
mod pages;
mod segments;
mod streams;
mod unasked;
mod undone;
mod unretired;

use crate::common::prelude::*;

fn waits(rig: &Rig) -> u64 {
    rig.calls("cuStreamWaitEvent")
}

/// Two devices, or a note that there are not two.
fn two_devices(test: impl Fn(&Rig, &Context)) {
    for policy in [Policy::Packed, Policy::Classic] {
        only_on(policy, SimConfig::with_devices(2, 8 << 30), |rig| {
            if rig.driver.device_count().unwrap() < 2 {
                return eprintln!("SKIPPED: needs two devices");
            }
            let second = rig.driver.device(1).unwrap();
            test(rig, &Context::primary(&second).unwrap());
        });
    }
}
