//! Names on a simulated disk: power cuts at any step, faults, damage, and twins that must fail.

use std::{collections::BTreeMap, io, path::Path};

use farpage_wire::{Durability, ExtentRange, Persistence};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;
use crate::durable::{
    PersistError, Stored,
    cut::{CutFolder, Lies, Step},
};

const DIRECTORY: &str = "/names";
const EXTENT_BYTES: u64 = 16 << 10;
const SLOT_BYTES: u64 = 256;
const PAGES: u64 = 24;

/// Starts a server of the names in `folder`.
pub(super) fn start(folder: &CutFolder, when: Persistence) -> Result<State, PersistError> {
    start_with(folder, when, 8 << 20)
}

fn start_with(
    folder: &CutFolder,
    when: Persistence,
    capacity_bytes: u64,
) -> Result<State, PersistError> {
    let path = Path::new(DIRECTORY);
    let stored = Stored::find_in(Box::new(folder.clone()), path, when)?;
    let state = State {
        // As many as the tests have names and extents.
        limits: Limits {
            extents: 64,
            extents_per_session: 32,
            extents_per_address: 64,
            ..state(capacity_bytes).limits
        },
        ..state(capacity_bytes)
    };
    state.restore(stored, path)
}

/// Version of a region: the slot and the byte of each page that was written.
pub(super) type Pages = BTreeMap<u64, (ExtentId, u64, u8)>;

fn manifest_of(pages: &Pages) -> Vec<u8> {
    let pages: Vec<_> = pages.iter().collect();
    postcard::to_stdvec(&pages).unwrap()
}

/// A program that has a name open for writing.
pub(super) struct Writer {
    pub(super) session: SessionId,
    pub(super) name: &'static str,
    pub(super) extents: Vec<Arc<ExtentMemory>>,
    pub(super) published: Pages,
    /// Publication that got an error: the name may be bound to it.
    pub(super) attempted: Option<Pages>,
    /// Slots of the two versions that the name may be bound to are free for new pages: wrong.
    pub(super) overwrites: bool,
}

impl Writer {
    /// Makes a region, or replaces the one of that name.
    pub(super) fn create(state: &State, name: &'static str) -> Self {
        let session = client(state, Transport::Tcp);
        state.claim(session, name, true).unwrap();
        Self {
            session,
            name,
            extents: vec![state.grant(session, EXTENT_BYTES).unwrap()],
            published: Pages::new(),
            attempted: None,
            overwrites: false,
        }
    }

    /// Opens what is published.
    pub(super) fn open(state: &State, name: &'static str) -> Result<Self, Refusal> {
        let session = client(state, Transport::Tcp);
        let opened = state.open(session, name);
        let opened = opened.inspect_err(|_| state.close(session))?;
        let pages: Vec<_> = postcard::from_bytes(&opened.manifest).unwrap();
        Ok(Self {
            session,
            name,
            extents: opened.extents,
            published: pages.into_iter().collect(),
            attempted: None,
            overwrites: false,
        })
    }

    /// True if all pages of the published version have their bytes.
    pub(super) fn is_whole(&self) -> bool {
        self.published.values().all(|(extent, offset, byte)| {
            let mut extents = self.extents.iter();
            let memory = extents.find(|memory| memory.id() == *extent);
            let mut bytes = vec![0; SLOT_BYTES as usize];
            let read = memory.map(|memory| memory.copy_out(*offset, &mut bytes));
            read == Some(Ok(())) && bytes.iter().all(|found| found == byte)
        })
    }

    /// Writes some pages to free slots. Returns the version, and the ranges that it added.
    pub(super) fn change(
        &mut self,
        state: &State,
        random: &mut ChaCha8Rng,
    ) -> (Pages, Vec<ExtentRange>) {
        if random.random_bool(0.1) && self.extents.len() < 6 {
            let extent = state.grant(self.session, EXTENT_BYTES).unwrap();
            self.extents.push(extent);
        }
        let (mut pages, mut ranges) = (self.published.clone(), Vec::new());
        for _ in 0..random.random_range(1..8) {
            let in_use = |extent, offset| {
                let has = |pages: &Pages| pages.values().any(|it| (it.0, it.1) == (extent, offset));
                let is_kept = has(&self.published) || self.attempted.as_ref().is_some_and(has);
                has(&pages) || (is_kept && !self.overwrites)
            };
            let (memory, offset) = loop {
                let memory = &self.extents[random.random_range(0..self.extents.len())];
                let slot = random.random_range(0..EXTENT_BYTES / SLOT_BYTES);
                if !in_use(memory.id(), slot * SLOT_BYTES) {
                    break (memory, slot * SLOT_BYTES);
                }
            };
            let byte = random.random_range(1..=255);
            memory
                .copy_in(offset, &[byte; SLOT_BYTES as usize])
                .unwrap();
            let page = random.random_range(0..PAGES);
            pages.insert(page, (memory.id(), offset, byte));
            ranges.push(ExtentRange {
                extent: memory.id(),
                offset,
                bytes: SLOT_BYTES,
            });
        }
        (pages, ranges)
    }

    /// Publishes a new version, as `farpage-store` does.
    pub(super) fn publish(
        &mut self,
        state: &State,
        random: &mut ChaCha8Rng,
    ) -> Result<(), Refusal> {
        let (pages, ranges) = self.change(state, random);
        let wait = random.random_bool(0.2);
        self.publish_version(state, pages, &ranges, wait)
    }

    /// Publishes a new version, whose bytes a server that writes soon has not written.
    pub(super) fn publish_soon(
        &mut self,
        state: &State,
        random: &mut ChaCha8Rng,
    ) -> Result<(), Refusal> {
        let (pages, ranges) = self.change(state, random);
        self.publish_version(state, pages, &ranges, false)
    }

    fn publish_version(
        &mut self,
        state: &State,
        pages: Pages,
        ranges: &[ExtentRange],
        wait: bool,
    ) -> Result<(), Refusal> {
        assert!(state.persist(self.session, self.name, ranges, wait)?);
        let extents: Vec<_> = self.extents.iter().map(|memory| memory.id()).collect();
        let manifest = manifest_of(&pages);
        self.attempted = Some(pages);
        state.publish(self.session, self.name, manifest, &extents)?;
        self.published = self.attempted.take().unwrap();
        Ok(())
    }
}

/// The versions that a name may have after a cut; `None` is no name.
type Possible = BTreeMap<&'static str, Vec<Option<Pages>>>;

/// The clients of one server, until an error.
struct Clients<'a> {
    state: &'a State,
    writers: BTreeMap<&'static str, Writer>,
    overwrites: bool,
}

impl Clients<'_> {
    /// Does something as a client of `name`. Notes in `versions` what the name may be bound to.
    fn act(
        &mut self,
        name: &'static str,
        versions: &mut Vec<Option<Pages>>,
        random: &mut ChaCha8Rng,
    ) -> Result<(), Refusal> {
        let Self { state, writers, .. } = self;
        let Some(writer) = writers.get_mut(name) else {
            let writer = match Writer::open(state, name) {
                Err(Refusal::NotFound) => Writer::create(state, name),
                opened => opened?,
            };
            let overwrites = self.overwrites;
            writers.insert(
                name,
                Writer {
                    overwrites,
                    ..writer
                },
            );
            return Ok(());
        };
        let session = writer.session;
        match random.random_range(0..20) {
            0 => {
                state.close(session);
                *writer = Writer::create(state, name);
            }
            1 => {
                state.close(session);
                writers.remove(name);
            }
            2 if !writer.published.is_empty() => {
                state.close(session);
                writers.remove(name);
                versions.push(None);
                state.remove(Asker::Key(KEY), name, None)?;
                *versions = vec![None];
            }
            _ => {
                let done = writer.publish(state, random);
                let attempted = writer.attempted.as_ref().unwrap_or(&writer.published);
                versions.push(Some(attempted.clone()));
                done?;
                match durability(state, name) {
                    Durability::Disk => *versions = vec![Some(writer.published.clone())],
                    other => assert!(matches!(other, Durability::Failed(_)), "{other:?}"),
                }
            }
        }
        Ok(())
    }
}

pub(super) fn durability(state: &State, name: &str) -> Durability {
    let names = state.names(Asker::Key(KEY), None).unwrap();
    let named = names.into_iter().find(|it| it.name == name);
    named.expect("the name is bound").durability
}

/// Publishes, removes, cuts the power at any step, and starts anew, many times. Returns what is
/// wrong, if anything is.
fn cuts(seed: u64, when: Persistence, lies: Lies, overwrites: bool) -> Result<(), String> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut folder = CutFolder::default();
    let mut possible: Possible = ["a", "b"].map(|name| (name, vec![None])).into();
    let mut state = start(&folder, when).map_err(|error| error.to_string())?;
    folder.lie(lies);
    for round in 0..30 {
        // 1. Clients, until the power is cut.
        folder.cut_after(random.random_range(0..200));
        let mut clients = Clients {
            state: &state,
            writers: BTreeMap::new(),
            overwrites,
        };
        let mut done = Ok(());
        while done.is_ok() && state.durable.as_ref().unwrap().broken().is_none() {
            let name = ["a", "b"][random.random_range(0..2)];
            done = clients.act(name, possible.get_mut(name).unwrap(), &mut random);
        }
        // 2. The next start finds one of the possible versions, and it is whole.
        folder = folder.cut(&mut random);
        state = start(&folder, when).map_err(|error| format!("round {round}: {error}"))?;
        state.check();
        for (name, versions) in &mut possible {
            let found = match Writer::open(&state, name) {
                Ok(writer) if !writer.is_whole() => {
                    return Err(format!("round {round}: {name} is torn"));
                }
                Ok(writer) => {
                    state.close(writer.session);
                    Some(writer.published)
                }
                Err(Refusal::NotFound) => None,
                Err(refusal) => return Err(format!("round {round}: {name}: {refusal}")),
            };
            if !versions.contains(&found) {
                return Err(format!("round {round}: {name} is another version"));
            }
            *versions = vec![found];
        }
        let bound = state.ledger.lock().extents.len();
        if folder.files("extent-").len() != bound || !folder.files("new-").is_empty() {
            return Err(format!("round {round}: files are left over"));
        }
    }
    Ok(())
}

#[test]
fn after_a_power_cut_at_any_step_each_name_is_its_last_published_version() {
    for seed in 0..60 {
        for when in [Persistence::AtOnce, Persistence::Soon] {
            let found = cuts(seed, when, Lies::default(), false);
            assert_eq!(found, Ok(()), "seed {seed}, {when:?}");
        }
    }
}

/// The twins of the test above: each breaks a rule, and loses a version.
#[test]
fn a_server_or_a_client_that_breaks_a_rule_of_the_order_loses_a_version() {
    let files = |prefix| Lies {
        files: Some(prefix),
        folder: false,
    };
    let folder = Lies {
        files: None,
        folder: true,
    };
    for (what, lies, overwrites) in [
        ("a binding comes before its bytes", files("extent-"), false),
        (
            "a rename comes before the file's bytes",
            files("new-"),
            false,
        ),
        ("the directory is not synced", folder, false),
        ("a published slot is written anew", Lies::default(), true),
    ] {
        let mut runs = (0..20).map(|seed| cuts(seed, Persistence::AtOnce, lies, overwrites));
        let found = runs.find_map(Result::err);
        println!("{what}: {found:?}");
        assert!(found.is_some(), "{what}, and nobody notices");
    }
}

/// Publishes a first version of `name`, and closes the name.
pub(super) fn publish_once(state: &State, name: &'static str) -> Pages {
    let mut random = ChaCha8Rng::seed_from_u64(1);
    let mut writer = Writer::create(state, name);
    writer.publish(state, &mut random).unwrap();
    state.close(writer.session);
    writer.published
}

#[test]
fn restored_names_have_owner_version_charge_and_are_read_and_written_as_before() {
    let folder = CutFolder::default();
    let state = start(&folder, Persistence::AtOnce).unwrap();
    let pages = publish_once(&state, "a");
    publish_once(&state, "b");
    let (granted, version) = {
        let session = client(&state, Transport::Tcp);
        let versions = state.readers(session, "a").unwrap();
        state.close(session);
        (state.stat().granted_bytes, versions.published)
    };
    drop(state);
    let state = start(&folder.reopen(), Persistence::AtOnce).unwrap();
    state.check();
    assert_eq!(state.stat().granted_bytes, granted);
    let stranger = admit(&state, Transport::Tcp, HERE).session;
    state.identify(stranger, PublicKey([9; 32])).unwrap();
    assert_eq!(state.open(stranger, "a").unwrap_err(), Refusal::NotFound);
    let reader = client(&state, Transport::Tcp);
    let read = state.read(reader, "a").unwrap();
    assert_eq!(*read.manifest, manifest_of(&pages));
    assert_eq!(state.readers(reader, "a").unwrap().published, version);
    let mut writer = Writer::open(&state, "a").unwrap();
    assert!(writer.is_whole());
    writer
        .publish(&state, &mut ChaCha8Rng::seed_from_u64(2))
        .unwrap();
    let versions = state.readers(writer.session, "a").unwrap();
    assert!(
        versions.published > version + 1,
        "{versions:?}: a number is used twice"
    );
    assert_eq!(versions.read.len(), 1);
    // Ids of extents that the directory knows are not given out again.
    let fresh = state.grant(writer.session, 4096).unwrap().id();
    assert!(state.ledger.lock().extents.keys().all(|id| *id <= fresh));
    state.close(reader);
    state.close(writer.session);
    state.check();
}

#[test]
fn a_publication_that_the_disk_refuses_leaves_the_one_before() {
    for (step, prefix, kind) in [
        (Step::Write, "extent-", io::ErrorKind::StorageFull),
        (Step::Write, "new-", io::ErrorKind::StorageFull),
        (Step::Rename, "new-", io::ErrorKind::StorageFull),
    ] {
        let folder = CutFolder::default();
        let state = start(&folder, Persistence::AtOnce).unwrap();
        publish_once(&state, "a");
        let mut random = ChaCha8Rng::seed_from_u64(3);
        let mut writer = Writer::open(&state, "a").unwrap();
        let before = writer.published.clone();
        folder.fail(Some((step, prefix, kind)));
        let refusal = writer.publish(&state, &mut random).unwrap_err().to_string();
        assert!(refusal.contains(DIRECTORY), "{refusal}");
        assert!(refusal.contains("no storage space"), "{refusal}");
        assert_eq!(durability(&state, "a"), Durability::Disk);
        // The name goes on once there is room.
        folder.fail(None);
        assert_eq!(writer.published, before);
        writer.publish(&state, &mut random).unwrap();
        state.close(writer.session);
        state.check();
        let state = start(&folder.reopen(), Persistence::AtOnce).unwrap();
        let again = Writer::open(&state, "a").unwrap();
        assert!(again.is_whole() && again.published == writer.published);
    }
}

#[test]
fn after_a_sync_that_failed_nothing_is_written_until_the_next_start() {
    for (step, prefix) in [
        (Step::SyncFile, "extent-"),
        (Step::SyncFile, "new-"),
        (Step::SyncFolder, ""),
    ] {
        let folder = CutFolder::default();
        let state = start(&folder, Persistence::AtOnce).unwrap();
        publish_once(&state, "a");
        let mut random = ChaCha8Rng::seed_from_u64(4);
        let mut writer = Writer::open(&state, "a").unwrap();
        let before = writer.published.clone();
        folder.fail(Some((step, prefix, io::ErrorKind::Other)));
        let first = writer.publish(&state, &mut random).unwrap_err().to_string();
        assert!(first.contains(DIRECTORY), "{first}");
        folder.fail(None);
        let written = folder.written_bytes();
        let again = writer.publish(&state, &mut random).unwrap_err().to_string();
        assert!(
            again.contains("until the server is started anew"),
            "{again}"
        );
        let asker = Asker::Session(writer.session);
        state.remove(asker, "a", None).unwrap_err();
        assert_eq!(folder.written_bytes(), written);
        assert!(state.stat().persist.error.contains(DIRECTORY));
        state.close(writer.session);
        state.check();
        let attempted = writer.attempted.clone();
        let state = start(&folder.reopen(), Persistence::AtOnce).unwrap();
        let found = Writer::open(&state, "a").unwrap();
        assert!(found.is_whole());
        assert!(found.published == before || Some(&found.published) == attempted.as_ref());
    }
}

#[test]
fn a_damaged_name_says_so_keeps_its_files_and_leaves_others_alone() {
    let corrupt = |bytes: &mut Vec<u8>| bytes[60] ^= 1;
    let cut = |bytes: &mut Vec<u8>| bytes.truncate(30);
    type Harm<'a> = &'a dyn Fn(&CutFolder, &str, &str);
    let harms: [(&str, Harm<'_>); 5] = [
        ("checksum", &|folder, name, _| folder.tamper(name, corrupt)),
        ("checksum", &|folder, name, _| folder.tamper(name, cut)),
        ("missing", &|folder, _, extent| folder.lose(extent)),
        ("bytes", &|folder, _, extent| folder.tamper(extent, cut)),
        ("reading", &|folder, _, extent| {
            folder.fail(Some((Step::Read, extent, io::ErrorKind::Other)));
        }),
    ];
    for (reason, harm) in harms {
        let folder = CutFolder::default();
        let state = start(&folder, Persistence::AtOnce).unwrap();
        publish_once(&state, "a");
        let (name, extent) = (
            folder.files("name-").remove(0),
            folder.files("extent-").remove(0),
        );
        publish_once(&state, "b");
        drop(state);
        let folder = folder.reopen();
        harm(&folder, &name, &extent);
        let files = folder.files("extent-").len();
        let state = start(&folder, Persistence::AtOnce).unwrap();
        folder.fail(None);
        state.check();
        assert!(Writer::open(&state, "b").unwrap().is_whole());
        let names = state.names(Asker::Key(KEY), None).unwrap();
        assert_eq!(names.len(), 2, "{names:?}");
        let damaged = names.iter().find(|it| it.name != "b").unwrap();
        let Durability::Damaged(why) = &damaged.durability else {
            panic!("{damaged:?}");
        };
        assert!(why.contains(reason) && why.contains(DIRECTORY), "{why}");
        assert_eq!(state.stat().persist.damaged_names, 1);
        let session = client(&state, Transport::Tcp);
        for refused in [
            state.open(session, &damaged.name).map(drop),
            state.read(session, &damaged.name).map(drop),
        ] {
            let text = refused.unwrap_err().to_string();
            assert!(
                text.contains(why) && text.contains("remove the name"),
                "{text}"
            );
        }
        assert_eq!(folder.files("extent-").len(), files);
        remove(&state, session, &damaged.name).unwrap();
        assert_eq!(folder.files("name-").len(), 1);
        drop(state);
        let state = start(&folder.reopen(), Persistence::AtOnce).unwrap();
        assert_eq!(state.names(Asker::Key(KEY), None).unwrap().len(), 1);
        assert_eq!(folder.files("extent-").len(), 1);
    }
}

#[test]
fn a_damaged_name_can_be_replaced() {
    let folder = CutFolder::default();
    let state = start(&folder, Persistence::AtOnce).unwrap();
    publish_once(&state, "a");
    drop(state);
    folder.lose(&folder.files("extent-")[0]);
    let state = start(&folder.reopen(), Persistence::AtOnce).unwrap();
    publish_once(&state, "a");
    state.check();
    assert_eq!(durability(&state, "a"), Durability::Disk);
    drop(state);
    let state = start(&folder.reopen(), Persistence::AtOnce).unwrap();
    assert!(Writer::open(&state, "a").unwrap().is_whole());
    assert_eq!(folder.files("").len(), 3);
}

#[test]
fn a_start_with_too_little_capacity_or_another_format_says_what_to_do() {
    let folder = CutFolder::default();
    let state = start(&folder, Persistence::AtOnce).unwrap();
    publish_once(&state, "a");
    drop(state);
    let folder = folder.reopen();
    let error = start_with(&folder, Persistence::AtOnce, 8192)
        .map(drop)
        .unwrap_err();
    let PersistError::Capacity { needed, .. } = error else {
        panic!("{error}");
    };
    start_with(&folder, Persistence::AtOnce, needed).unwrap();
    folder.reopen().tamper("format", |bytes| {
        *bytes = b"farpage names, format 9\n".to_vec()
    });
    let error = start(&folder, Persistence::AtOnce).map(drop).unwrap_err();
    assert!(matches!(error, PersistError::Format { .. }), "{error}");
    folder.lose("format");
    let error = start(&folder, Persistence::AtOnce).map(drop).unwrap_err();
    assert!(matches!(error, PersistError::NotNames { .. }), "{error}");
}

#[test]
fn the_files_of_removed_and_replaced_regions_are_removed() {
    let folder = CutFolder::default();
    let state = start(&folder, Persistence::AtOnce).unwrap();
    publish_once(&state, "a");
    publish_once(&state, "a");
    assert_eq!(folder.files("extent-").len(), 1);
    let session = client(&state, Transport::Tcp);
    remove(&state, session, "a").unwrap();
    assert_eq!(folder.files(""), ["format"]);
    state.check();
}

#[test]
fn bytes_are_persisted_only_by_the_holder_within_its_own_extents() {
    let folder = CutFolder::default();
    let state = start(&folder, Persistence::AtOnce).unwrap();
    let [ours, other] = clients(&state, [Transport::Tcp; 2]);
    let extent = state.grant(ours, 4096).unwrap().id();
    let range = |offset, bytes| {
        [ExtentRange {
            extent,
            offset,
            bytes,
        }]
    };
    let persist = |session, ranges: &[ExtentRange]| state.persist(session, "a", ranges, true);
    state.claim(ours, "a", false).unwrap();
    persist(ours, &range(0, 4096)).unwrap();
    assert_eq!(persist(other, &[]), Err(Refusal::InUse));
    for (offset, bytes) in [(0, 4097), (4096, 1), (u64::MAX, 2), (0, 0)] {
        persist(ours, &range(offset, bytes)).unwrap_err();
    }
    let theirs = state.grant(other, 4096).unwrap().id();
    let range = [ExtentRange {
        extent: theirs,
        offset: 0,
        bytes: 1,
    }];
    assert_eq!(persist(ours, &range), Err(Refusal::NotLeased(theirs)));
}
