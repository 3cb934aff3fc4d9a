//! Steps of a worker that brings in a page that it owns.

use farpage_pager::protocol::{self, OnFailed, PageState, PageWord};

use super::{
    Harm, Twin,
    moves::Moves,
    world::{Bytes, EVICTOR, Mapping, Next, Page, WORKER_NAMES},
};

impl Moves<'_> {
    /// Adds the step of an owner that brings a page in: a filler, or a worker that puts it back.
    pub(super) fn of_owner(&mut self, me: usize) {
        let paging = self.paging;
        let worker = self.world.workers[me];
        let page = usize::from(worker.page);
        let Page { word, stored, .. } = self.world.pages[page];
        let mapped = self.world.pages[page].is_mapped();
        match worker.next {
            Next::TakeFrame => {
                if paging.frames.is_none() {
                    self.must(me, "takes a frame", |w| {
                        w.go(me, Next::Fetch);
                        Ok(())
                    });
                } else if self.world.frames > 0 {
                    self.must(me, "takes a frame", |w| {
                        w.frames -= 1;
                        w.go(me, Next::Fetch);
                        Ok(())
                    });
                }
            }
            Next::Fetch => {
                self.must(me, "reads from the store", |w| {
                    let early = paging.is(Twin::PublishesBeforeInstall);
                    if early {
                        paging.publish(w, page, PageState::Filling, |word| {
                            protocol::installed(word, 0, 0)
                        })?;
                    }
                    w.go(
                        me,
                        if early {
                            Next::LateInstall(stored)
                        } else {
                            Next::Install(stored)
                        },
                    );
                    Ok(())
                });
                if paging.fills_fail {
                    self.must(me, "fails to read from the store", |w| {
                        w.go(me, Next::PublishFailed);
                        Ok(())
                    });
                }
            }
            Next::Install(_) | Next::LateInstall(_) if mapped => {
                self.must(me, "finds the page mapped already, drops the frame", |w| {
                    // The frame's share of the budget stands for the mapped page from now on.
                    w.go(me, Next::AlreadyMapped);
                    Ok(())
                });
            }
            Next::Reinstall(_) if mapped => self.must(me, "finds the page mapped already", |_| {
                Err(Harm::MappedTwice)
            }),
            Next::Install(version) | Next::Reinstall(version) | Next::LateInstall(version) => {
                if paging.remaps_fail && matches!(worker.next, Next::Reinstall(_)) {
                    self.must(me, "cannot map the page again", |w| {
                        // A page that was lost before stays lost, whatever it should have become.
                        let was_lost = w.pages[page].mapping == Mapping::Poison;
                        if version == stored && !was_lost {
                            w.go(me, Next::PublishFailed);
                        } else {
                            w.add_frames(paging, 1);
                            let forgets = paging.is(Twin::CallsLostRemote) && !word.wanted();
                            if forgets {
                                w.pages[page].word = protocol::removed(word, 0).0;
                            }
                            w.go(
                                me,
                                if forgets {
                                    Next::Idle
                                } else {
                                    Next::Poison(Bytes::Lost)
                                },
                            );
                        }
                        Ok(())
                    });
                }
                self.must(me, "maps the page", |w| {
                    w.map(page, Mapping::Mapped(version));
                    w.go(me, Next::WakeInstalled);
                    Ok(())
                });
            }
            Next::AlreadyMapped if paging.is(Twin::NoWakeWhenAlreadyMapped) => {
                self.must(me, "publishes installed and wakes nobody", |w| {
                    paging.publish(w, page, PageState::Filling, |word| {
                        protocol::installed(word, 0, 0)
                    })?;
                    w.go(me, Next::Idle);
                    Ok(())
                })
            }
            Next::AlreadyMapped => self.must(me, "wakes all the same", |w| {
                w.wake(paging, page);
                w.go(me, Next::PublishInstalled);
                Ok(())
            }),

            Next::WakeInstalled => self.must(me, "wakes", |w| {
                w.wake(paging, page);
                w.go(me, Next::PublishInstalled);
                Ok(())
            }),
            Next::PublishInstalled => self.must(me, "publishes installed", |w| {
                let noted = paging.publish(w, page, owned_by(me), |word| {
                    protocol::installed(word, 0, 0)
                })?;
                w.go(
                    me,
                    if noted && !paging.is(Twin::NoWakeForLateNote) {
                        Next::Wake
                    } else {
                        Next::Idle
                    },
                );
                Ok(())
            }),
            Next::PublishFailed => self.must(me, "publishes the failure", |w| {
                w.add_frames(paging, 1);
                if word.state() != owned_by(me) {
                    return Err(Harm::Ownership);
                }
                let (next, outcome) = match protocol::fill_failed(word) {
                    (_, OnFailed::MustPoison) if paging.is(Twin::DropsFailedFill) => {
                        (PageWord::default(), OnFailed::Dropped)
                    }
                    other => other,
                };
                w.pages[page].word = next;
                w.go(
                    me,
                    if outcome == OnFailed::Dropped {
                        Next::Idle
                    } else {
                        Next::Poison(Bytes::Stored)
                    },
                );
                Ok(())
            }),
            Next::Poison(_) if mapped => self.must(me, "cannot poison a mapped page", |w| {
                w.go(me, Next::AlreadyMapped);
                Ok(())
            }),
            Next::Poison(bytes) => self.must(me, "poisons", |w| {
                w.pages[page].mapping = Mapping::Poison;
                w.go(me, Next::WakePoisoned(bytes));
                Ok(())
            }),
            Next::WakePoisoned(bytes) => self.must(me, "wakes", |w| {
                w.wake(paging, page);
                w.go(me, Next::PublishPoisoned(bytes));
                Ok(())
            }),
            Next::PublishPoisoned(bytes) => self.must(me, "publishes poisoned or lost", |w| {
                let is_lost = bytes == Bytes::Lost && !paging.is(Twin::CallsLostPoisoned);
                let transition = if is_lost {
                    protocol::lost
                } else {
                    protocol::poisoned
                };
                let owned = match bytes {
                    Bytes::Lost => PageState::Leaving,
                    Bytes::Stored => owned_by(me),
                };
                let noted = paging.publish(w, page, owned, transition)?;
                w.go(
                    me,
                    if noted && !paging.is(Twin::NoWakeForLateNote) {
                        Next::Wake
                    } else {
                        Next::Idle
                    },
                );
                Ok(())
            }),
            Next::Wake => self.must(me, "wakes", |w| {
                w.wake(paging, page);
                w.go(me, Next::Idle);
                Ok(())
            }),
            other => unreachable!("{} does not take the step {other:?}", WORKER_NAMES[me]),
        }
    }
}

/// Returns the state of the pages that a worker owns. (A filler that poisons a lost page once more
/// owns it as `Leaving`.)
fn owned_by(worker: usize) -> PageState {
    if worker < EVICTOR {
        PageState::Filling
    } else {
        PageState::Leaving
    }
}
