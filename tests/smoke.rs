use cualloc::driver::{Context, Driver, Stream};
use cualloc::sim::{Mode, SimConfig, Simulator};
use cualloc::{Allocator, Config, Policy};

fn run(policy: Policy, streams: usize, limit: Option<u64>, lag: u64, steps: usize, seed: u64) {
    let sim = Simulator::new(SimConfig::with_devices(1, 8 << 30)).unwrap();
    sim.set_mode(if lag == 0 {
        Mode::Instant
    } else {
        Mode::Lag(lag)
    });
    let driver: Driver = sim.driver().unwrap();
    let context = Context::primary(&driver, driver.device(0).unwrap()).unwrap();
    let alloc =
        Allocator::with_config(&context, Config::new().policy(policy).limit(limit)).unwrap();
    let streams: Vec<Stream> = (0..streams)
        .map(|_| alloc.create_stream().unwrap())
        .collect();
    let mut x = seed;
    let mut rnd = move || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x
    };
    let mut live = Vec::new();
    let mut ooms = 0;
    for step in 0..steps {
        let r = rnd() % 100;
        if r < 52 && live.len() < 300 {
            let bits = 6 + rnd() % 20;
            let size = (rnd() % (1 << bits)) as usize + 1;
            let s = &streams[rnd() as usize % streams.len()];
            match alloc.allocate(size, s) {
                Ok(b) => {
                    let e = context.enter().unwrap();
                    unsafe { e.memset_d8(b.ptr(), 7, size, s.raw()).unwrap() };
                    live.push((b, size));
                }
                Err(e) if e.is_out_of_memory() => {
                    ooms += 1;
                }
                Err(e) => panic!("{e:?}"),
            }
        } else if r < 60 && !live.is_empty() {
            let at = rnd() as usize % live.len();
            let s = &streams[rnd() as usize % streams.len()];
            let (b, _size) = &live[at];
            // read on another stream after an event
            b.record_stream(s).unwrap();
        } else if r == 61 && rnd() % 10 == 0 {
            alloc.empty_cache().unwrap();
        } else if !live.is_empty() {
            let at = rnd() as usize % live.len();
            live.swap_remove(at);
        }
        sim.advance_row();
        if step % 50 == 0 {
            alloc
                .check()
                .unwrap_or_else(|e| panic!("{policy:?} step {step}: {e}"));
        }
    }
    let reports = sim.reports();
    assert!(
        reports.is_empty(),
        "{:#?}",
        &reports[..reports.len().min(3)]
    );
    let st = alloc.stats();
    eprintln!(
        "{policy:?} streams {} limit {limit:?} lag {lag}: ooms {ooms} reserved peak {} requested peak {} {:?}",
        streams.len(),
        st.all.reserved.peak >> 20,
        st.all.requested.peak >> 20,
        st.rungs
    );
    live.clear();
    alloc.check().unwrap();
    alloc.close().unwrap();
    alloc.check().unwrap();
    assert_eq!(sim.memory_in_use(0), 0);
    drop(alloc);
}

#[test]
fn smoke() {
    for policy in [Policy::Packed, Policy::Classic] {
        for streams in [1, 3] {
            for lag in [0, 20] {
                for limit in [None, Some(600 << 20)] {
                    for seed in 1..4 {
                        run(policy, streams, limit, lag, 5000, seed * 7919);
                    }
                }
            }
        }
    }
}
