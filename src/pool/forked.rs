//! A forked child does not wait for a pool that a thread of its parent changed.

use super::*;

#[test]
fn d9_nothing_waits_for_workspaces_in_a_forked_child() -> Result<(), Box<dyn std::error::Error>> {
    let sim = crate::sim::Simulator::new(crate::sim::SimConfig::default())?;
    let driver = sim.driver()?;
    let context = driver.context(0)?;
    let allocator = Allocator::with_config(&context, crate::allocator::Config::new())?;
    let stream = allocator.create_stream()?;
    let pool = WorkspacePool::new(&allocator);
    let mut lease = Some(pool.lease(&stream, 100)?);
    let locked = pool.0.lock();
    let told = process::child_says(|| {
        drop(lease.take());
        let refused = pool.lease(&stream, 100).is_err();
        refused && pool.trim(0).is_err() && pool.usage().is_ok_and(|it| it == Usage::default())
    });
    drop(locked);
    assert!(told);
    Ok(())
}
