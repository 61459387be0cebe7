//! Executables: made of a graph, changed, destroyed.

use super::{Exec, Step, Task};
use crate::driver::sys::*;
use crate::sim::args::Out;
use crate::sim::call::{R, fail};
use crate::sim::state::State;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

impl State {
    /// An executable that is there.
    pub(super) fn exec(&mut self, exec: CUgraphExec) -> R<u64> {
        let value = exec as u64;
        match self.graphs.execs.get(value) {
            Some(entry) if !entry.destroyed => Ok(value),
            _ => {
                let existed = self.graphs.execs.existed(value);
                self.dead("executable graph", value, existed);
                fail(INVALID)
            }
        }
    }

    /// The steps of a graph, and the contexts of its lanes. Work that has no context is `ctx`'s.
    fn steps_of(&self, graph: u64, ctx: usize) -> (Vec<Step>, Vec<usize>) {
        let nodes = self.graphs.graphs.get(graph).map(|graph| &graph.nodes);
        let mut index = HashMap::new();
        let mut steps: Vec<Step> = Vec::new();
        let mut lanes: Vec<(usize, usize)> = Vec::new();
        for &handle in nodes.into_iter().flatten() {
            let Some(node) = self.graphs.nodes.get(handle) else {
                continue;
            };
            let mut after: BTreeSet<usize> = BTreeSet::new();
            for link in &node.links {
                let Some(&before) = index.get(&link.node) else {
                    continue;
                };
                if link.is_whole() {
                    after.insert(before);
                } else {
                    // The step begins when the other one has begun, not when it is complete.
                    after.extend(&steps[before].after);
                }
            }
            let own = node.task.as_ref().map_or(ctx, |task: &Task| task.ctx);
            let place = steps.len();
            let follows = |(tail, of): &(usize, usize)| *of == own && after.contains(tail);
            let lane = match lanes.iter().position(follows) {
                Some(lane) => {
                    lanes[lane].0 = place;
                    lane
                }
                None => {
                    lanes.push((place, own));
                    lanes.len() - 1
                }
            };
            index.insert(handle, place);
            steps.push(Step {
                node: handle,
                task: node.task.clone(),
                after: after.into_iter().collect(),
                lane,
            });
        }
        (steps, lanes.into_iter().map(|(_, ctx)| ctx).collect())
    }

    /// Removes a destroyed executable when none of its launches is in progress.
    fn drop_finished_exec(&mut self, exec: u64) {
        let over = |entry: &Exec| entry.destroyed && entry.running == 0;
        if !self.graphs.execs.get(exec).is_some_and(over) {
            return;
        }
        if let Some(gone) = self.graphs.execs.remove(exec) {
            for (queue, _) in gone.lanes {
                self.retire_queue(queue);
            }
            if let Some(last) = &gone.last {
                self.record_last_launch(&gone.objects, last);
            }
            self.drop_all(gone.objects);
        }
    }

    /// A launch is complete.
    pub(in crate::sim) fn launch_done(&mut self, exec: u64) {
        let Some(entry) = self.graphs.execs.get_mut(exec) else {
            return;
        };
        entry.running -= 1;
        if entry.running == 0 {
            for objects in std::mem::take(&mut entry.replaced) {
                self.drop_all(objects);
            }
        }
        self.drop_finished_exec(exec);
    }

    /// Destroys the executables that have work in a context that is being destroyed.
    pub(in crate::sim) fn destroy_execs_of(&mut self, ctx: usize) {
        let has = |entry: &Exec| entry.lanes.iter().any(|(_, of)| *of == ctx);
        let execs = self.graphs.execs.iter();
        let list: Vec<u64> = execs.filter(|(_, e)| has(e)).map(|(e, _)| e).collect();
        for exec in list {
            if let Some(entry) = self.graphs.execs.get_mut(exec) {
                entry.destroyed = true;
            }
            self.drop_finished_exec(exec);
        }
    }
}

#[allow(non_snake_case)]
impl State {
    pub(in crate::sim) fn cuGraphInstantiateWithFlags(
        &mut self,
        out: Out<CUgraphExec>,
        graph: CUgraph,
        _flags: u64,
    ) -> R {
        out.check()?;
        let ctx = self.current()?;
        let graph = self.graph(graph)?;
        let (steps, contexts) = self.steps_of(graph, ctx);
        if contexts.iter().any(|&ctx| !self.ctxs[ctx].alive) {
            return fail(CUresult::CUDA_ERROR_INVALID_CONTEXT);
        }
        let objects = self.graphs.graphs.get(graph).map(|g| g.objects.clone());
        let objects = self.share_all(&objects.unwrap_or_default());
        let lanes = contexts.into_iter();
        let lanes = lanes.map(|ctx| (self.new_lane(ctx), ctx)).collect();
        let exec = self.graphs.execs.add(Exec {
            steps: steps.into(),
            lanes,
            objects,
            replaced: Vec::new(),
            running: 0,
            destroyed: false,
            last: None,
        });
        out.set(exec as CUgraphExec)
    }

    pub(in crate::sim) fn cuGraphExecUpdate_v2(
        &mut self,
        exec: CUgraphExec,
        graph: CUgraph,
        info: Out<CUgraphExecUpdateResultInfo>,
    ) -> R {
        type U = CUgraphExecUpdateResult;
        let exec = self.exec(exec)?;
        let graph = self.graph(graph)?;
        let ctx = self.current()?;
        let (steps, contexts) = self.steps_of(graph, ctx);
        let Some(entry) = self.graphs.execs.get(exec) else {
            return fail(INVALID);
        };
        let kind = |step: &Step| step.task.as_ref().map(Task::kind);
        let pairs = || entry.steps.iter().zip(&steps);
        let same_lanes = entry.lanes.iter().map(|(_, ctx)| ctx).eq(&contexts);
        let moved = pairs().find(|(old, new)| old.after != new.after);
        let changed = pairs().find(|(old, new)| kind(old) != kind(new));
        let (result, node) = match (moved, changed) {
            (Some((_, new)), _) => (U::CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED, new.node),
            _ if entry.steps.len() != steps.len() || !same_lanes => {
                (U::CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED, 0)
            }
            (_, Some((_, new))) => (U::CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED, new.node),
            _ => (U::CU_GRAPH_EXEC_UPDATE_SUCCESS, 0),
        };
        info.set_if(CUgraphExecUpdateResultInfo {
            result,
            errorNode: node as CUgraphNode,
            errorFromNode: std::ptr::null_mut(),
        });
        if result != U::CU_GRAPH_EXEC_UPDATE_SUCCESS {
            return fail(CUresult::CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
        }
        let objects = self.graphs.graphs.get(graph).map(|g| g.objects.clone());
        let objects = self.share_all(&objects.unwrap_or_default());
        let Some(entry) = self.graphs.execs.get_mut(exec) else {
            return fail(INVALID);
        };
        entry.steps = Arc::from(steps);
        let old = std::mem::replace(&mut entry.objects, objects);
        if entry.running > 0 {
            entry.replaced.push(old);
        } else {
            self.drop_all(old);
        }
        Ok(())
    }

    pub(in crate::sim) fn cuGraphExecDestroy(&mut self, exec: CUgraphExec) -> R {
        let exec = self.exec(exec)?;
        if let Some(entry) = self.graphs.execs.get_mut(exec) {
            entry.destroyed = true;
        }
        self.drop_finished_exec(exec);
        Ok(())
    }
}
