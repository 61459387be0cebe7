//! Training with sharded parameters, as one of the devices sees it.

use super::draft::{CreatedBlock, Draft, Program, Random, RowSource};

const COMPUTE: u32 = 0;
const GATHER: u32 = 1;
const REDUCE: u32 = 2;

const LAYERS: usize = 24;
/// Number of training steps of the default program.
const STEPS: usize = 4;
/// Devices that share the parameters.
const SHARDS: u64 = 8;
/// Bytes of a parameter, of its gradient, and of its optimizer's state.
const PARAMETER: u64 = 2;
const STATE: u64 = 12;
/// Number of rows until another stream has finished with a block freed by its owner.
const LATE: usize = 7;

pub(super) struct Sharded {
    random: Random,
    model: Model,
    late: Vec<LateFree>,
    /// Steps still to take.
    steps: usize,
    started: bool,
}

struct Model {
    /// Parameters of each layer; the first is the embedding table.
    layers: Vec<u64>,
    width: u64,
    hidden: u64,
}

/// A block freed by its owner that another stream still uses.
struct LateFree {
    /// Row from which the use is over.
    due: usize,
    block: CreatedBlock,
    /// The row that freed it.
    freed: usize,
}

/// The draft, and the blocks that complete late.
struct Writer<'a> {
    draft: &'a mut Draft,
    late: &'a mut Vec<LateFree>,
}

impl Writer<'_> {
    fn allocate(&mut self, bytes: u64, stream: u32) -> CreatedBlock {
        self.complete();
        self.draft.allocate(bytes, stream)
    }

    fn free(&mut self, block: CreatedBlock) {
        self.complete();
        self.draft.free(block);
    }

    /// Frees a block that work of another stream was just submitted for.
    fn free_late(&mut self, block: CreatedBlock) {
        self.complete();
        let freed = self.draft.free_late(block);
        self.late.push(LateFree {
            due: self.draft.rows + LATE,
            block,
            freed,
        });
    }

    fn complete(&mut self) {
        while self
            .late
            .first()
            .is_some_and(|late| late.due <= self.draft.rows)
        {
            let late = self.late.remove(0);
            self.draft.complete(late.block, Some(late.freed));
        }
    }
}

impl Sharded {
    pub(super) fn new(program: &Program) -> Sharded {
        let mut random = Random::new(program.seed);
        let width = 256 * random.between(6, 12);
        let hidden = 256 * random.between(12, 40);
        let layer = 4 * width * width + 3 * width * hidden;
        let mut layers = vec![width * 1024 * random.between(24, 64)];
        layers.extend(std::iter::repeat_n(layer, LAYERS));
        Sharded {
            random,
            model: Model {
                layers,
                width,
                hidden,
            },
            late: Vec::new(),
            // With a given number of rows the generator stops at the last row, so steps are unbounded.
            steps: program.rows.map_or(STEPS, |_| usize::MAX),
            started: false,
        }
    }
}

impl RowSource for Sharded {
    fn make(&mut self, draft: &mut Draft) -> bool {
        let late = &mut self.late;
        let mut writer = Writer { draft, late };
        if !self.started {
            self.started = true;
            for parameters in &self.model.layers {
                writer.allocate(parameters / SHARDS * PARAMETER, COMPUTE);
                writer.allocate(parameters / SHARDS * STATE, COMPUTE);
            }
        } else if self.steps > 0 {
            self.steps -= 1;
            step(&mut writer, &self.model, &mut self.random);
        } else {
            return false;
        }
        true
    }
}

/// A forward and a backward pass, and the update.
fn step(writer: &mut Writer<'_>, model: &Model, random: &mut Random) {
    // Batches differ in their number of tokens.
    let tokens = 64 * random.between(24, 160);
    let mut saved: Vec<Vec<CreatedBlock>> = Vec::new();
    let mut next = Some(writer.allocate(model.layers[0] * PARAMETER, GATHER));
    for layer in 0..model.layers.len() {
        let gathered = next.take();
        // The next layer is gathered while this one computes.
        if let Some(parameters) = model.layers.get(layer + 1) {
            next = Some(writer.allocate(parameters * PARAMETER, GATHER));
        }
        saved.push(forward(writer, model, tokens));
        if let Some(block) = gathered {
            writer.free_late(block);
        }
    }
    let mut shards = Vec::new();
    let mut upstream = writer.allocate(tokens * model.width * 2, COMPUTE);
    for layer in (0..model.layers.len()).rev() {
        let gathered = next
            .take()
            .unwrap_or_else(|| writer.allocate(model.layers[layer] * PARAMETER, GATHER));
        if layer > 0 {
            next = Some(writer.allocate(model.layers[layer - 1] * PARAMETER, GATHER));
        }
        let full = writer.allocate(model.layers[layer] * PARAMETER, COMPUTE);
        let down = writer.allocate(tokens * model.width * 2, COMPUTE);
        for block in saved.pop().unwrap_or_default().into_iter().rev() {
            let gradient = writer.allocate(tokens * model.width * 2, COMPUTE);
            writer.free(block);
            writer.free(gradient);
        }
        writer.free(upstream);
        upstream = down;
        writer.free_late(gathered);
        // The gradient goes to the reducing stream, which keeps this device's part of it.
        let wire = writer.allocate(model.layers[layer] * PARAMETER, REDUCE);
        shards.push(writer.allocate(model.layers[layer] / SHARDS * PARAMETER, REDUCE));
        writer.free_late(full);
        writer.free(wire);
    }
    writer.free(upstream);
    for (shard, parameters) in shards.into_iter().zip(model.layers.iter().rev()) {
        let update = writer.allocate(parameters / SHARDS * 4, COMPUTE);
        writer.free_late(shard);
        writer.free(update);
    }
}

/// Runs one layer forward; returns the blocks kept for the backward pass.
fn forward(writer: &mut Writer<'_>, model: &Model, tokens: u64) -> Vec<CreatedBlock> {
    let narrow = tokens * model.width * 2;
    let wide = tokens * model.hidden * 2;
    let norm = writer.allocate(narrow, COMPUTE);
    let scale = writer.allocate(tokens * 4, COMPUTE);
    let projected = writer.allocate(3 * narrow, COMPUTE);
    let scratch = writer.allocate(narrow + tokens * 512, COMPUTE);
    let mixed = writer.allocate(narrow, COMPUTE);
    writer.free(scratch);
    let gate = writer.allocate(wide, COMPUTE);
    let up = writer.allocate(wide, COMPUTE);
    let product = writer.allocate(wide, COMPUTE);
    let out = writer.allocate(narrow, COMPUTE);
    writer.free(product);
    writer.free(norm);
    vec![scale, projected, mixed, gate, up, out]
}
