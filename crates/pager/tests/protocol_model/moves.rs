//! Moves that can happen in one world: [`Moves`].

use super::{
    Harm, Paging, Step,
    world::{WORKER_NAMES, World},
};
use crate::explore::{Label, Move};

/// Collector of the moves that can happen in one world.
pub(super) struct Moves<'a> {
    pub(super) paging: &'a Paging,
    pub(super) world: &'a World,
    pub(super) out: &'a mut Vec<Move<World, Harm>>,
}

impl Moves<'_> {
    pub(super) fn add(
        &mut self,
        compulsory: bool,
        label: Label,
        step: impl FnOnce(&mut World) -> Step,
    ) {
        let mut next = *self.world;
        let to = step(&mut next).map(|()| {
            // The fillers are interchangeable: worlds that differ by their names only are one.
            next.workers[..2].sort_unstable();
            next
        });
        self.out.push(Move {
            compulsory,
            label,
            to,
        });
    }

    pub(super) fn must(
        &mut self,
        worker: usize,
        does: &'static str,
        step: impl FnOnce(&mut World) -> Step,
    ) {
        let label = Label {
            actor: WORKER_NAMES[worker],
            does,
            page: self.world.workers[worker].page.into(),
        };
        self.add(true, label, step);
    }

    pub(super) fn may(
        &mut self,
        worker: usize,
        does: &'static str,
        page: usize,
        step: impl FnOnce(&mut World) -> Step,
    ) {
        self.add(
            false,
            Label {
                actor: WORKER_NAMES[worker],
                does,
                page,
            },
            step,
        );
    }
}
