//! User objects, whose function is called once a graph, its executables and their launches no longer exist.

use super::{Launch, References, UserObject};
use crate::driver::sys::*;
use crate::sim::args::Out;
use crate::sim::call::{R, fail};
use crate::sim::objects::Callback;
use crate::sim::state::State;
use std::ffi::{c_uint, c_void};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

impl State {
    fn user_object(&mut self, object: CUuserObject) -> R<u64> {
        let value = object as u64;
        if self.graphs.objects.get(value).is_some() {
            return Ok(value);
        }
        self.dead("user object", value, self.graphs.objects.existed(value));
        fail(INVALID)
    }

    /// Drops references to a user object; after the last one its function is called.
    fn drop_references(&mut self, object: u64, count: u64) {
        let Some(entry) = self.graphs.objects.get_mut(object) else {
            return;
        };
        entry.count = entry.count.saturating_sub(count);
        if entry.count == 0
            && let Some(gone) = self.graphs.objects.remove(object)
        {
            for (queue, seq, clock) in &gone.launches {
                self.see(*queue, *seq, clock);
            }
            self.defer(gone.callback);
        }
    }

    /// Drops all references that something held.
    pub(super) fn drop_all(&mut self, held: References) {
        for (object, count) in held {
            self.drop_references(object, count);
        }
    }

    /// Records the last launch of a holder of objects, which has ended.
    pub(super) fn record_last_launch(&mut self, held: &References, last: &Launch) {
        for object in held.keys() {
            if let Some(entry) = self.graphs.objects.get_mut(*object) {
                entry.launches.push(last.clone());
            }
        }
    }

    /// References of one more holder to the same objects.
    pub(super) fn share_all(&mut self, held: &References) -> References {
        for (object, count) in held {
            if let Some(entry) = self.graphs.objects.get_mut(*object) {
                entry.count += count;
            }
        }
        held.clone()
    }
}

#[allow(non_snake_case)]
impl State {
    pub(in crate::sim) fn cuUserObjectCreate(
        &mut self,
        object: Out<CUuserObject>,
        pointer: *mut c_void,
        destroy: CUhostFn,
        references: c_uint,
        flags: c_uint,
    ) -> R {
        object.check()?;
        if destroy.is_none() || references == 0 || flags != CU_USER_OBJECT_NO_DESTRUCTOR_SYNC {
            return fail(INVALID);
        }
        let value = self.graphs.objects.add(UserObject {
            count: references.into(),
            callback: Callback {
                function: destroy,
                data: pointer as usize,
                alone: true,
                late: self.config.late_destructors,
            },
            launches: Vec::new(),
        });
        object.set(value as CUuserObject)
    }

    pub(in crate::sim) fn cuUserObjectRetain(&mut self, object: CUuserObject, count: c_uint) -> R {
        let value = self.user_object(object)?;
        if count == 0 {
            return fail(INVALID);
        }
        if let Some(entry) = self.graphs.objects.get_mut(value) {
            entry.count += u64::from(count);
        }
        Ok(())
    }

    pub(in crate::sim) fn cuUserObjectRelease(&mut self, object: CUuserObject, count: c_uint) -> R {
        let value = self.user_object(object)?;
        let held = self.graphs.objects.get(value).map_or(0, |o| o.count);
        if count == 0 || u64::from(count) > held {
            self.misuse("more references released than there are", value);
            return fail(INVALID);
        }
        self.drop_references(value, count.into());
        Ok(())
    }

    pub(in crate::sim) fn cuGraphRetainUserObject(
        &mut self,
        graph: CUgraph,
        object: CUuserObject,
        count: c_uint,
        flags: c_uint,
    ) -> R {
        let graph = self.graph(graph)?;
        let value = self.user_object(object)?;
        if count == 0 || flags & !CU_GRAPH_USER_OBJECT_MOVE != 0 {
            return fail(INVALID);
        }
        if flags & CU_GRAPH_USER_OBJECT_MOVE == 0
            && let Some(entry) = self.graphs.objects.get_mut(value)
        {
            entry.count += u64::from(count);
        }
        if let Some(entry) = self.graphs.graphs.get_mut(graph) {
            *entry.objects.entry(value).or_default() += u64::from(count);
        }
        Ok(())
    }

    pub(in crate::sim) fn cuGraphReleaseUserObject(
        &mut self,
        graph: CUgraph,
        object: CUuserObject,
        count: c_uint,
    ) -> R {
        let graph = self.graph(graph)?;
        let value = self.user_object(object)?;
        let Some(entry) = self.graphs.graphs.get_mut(graph) else {
            return fail(INVALID);
        };
        let held = entry.objects.get(&value).copied().unwrap_or(0);
        let Some(left) = held.checked_sub(count.into()).filter(|_| count > 0) else {
            self.misuse("more references released than the graph has", value);
            return fail(INVALID);
        };
        match left {
            0 => entry.objects.remove(&value),
            _ => entry.objects.insert(value, left),
        };
        self.drop_references(value, count.into());
        Ok(())
    }
}
