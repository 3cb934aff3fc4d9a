//! Regions with parity that were promised their room, on servers that others fill: they take all
//! that goes back, after every step.

use std::thread;

use super::{
    copies::{World, impatient},
    parity::options,
    *,
};
use crate::groups::ExtentGroup;

/// Other clients of the same servers, which take all that these can lend, in pieces of 64 KiB.
pub(super) struct Others(Vec<(Arc<Session>, Mutex<Vec<ExtentId>>)>);

impl Others {
    pub(super) fn of(world: &World) -> Self {
        let sessions = world.servers.iter().map(session);
        Self(
            sessions
                .map(|session| (session, Mutex::default()))
                .collect(),
        )
    }

    pub(super) fn take_all(&self) {
        for (session, taken) in &self.0 {
            while let Ok(extent) = session.grant(64 << 10) {
                taken.lock().push(extent.id);
            }
        }
    }

    /// Gives all back to a server.
    pub(super) fn give_back(&self, server: usize) {
        let (session, taken) = &self.0[server];
        for id in taken.lock().drain(..) {
            session.release(id).expect("the server lives");
        }
    }
}

/// Pages of the regions here.
const PAGES: u64 = 384;

/// Makes a region that was promised its room, writes it, and gives it parity.
pub(super) fn reserved(code: (u8, u8), servers: u64) -> (World, Arc<PageStore>, Queue, Vec<u8>) {
    let lent = 4 << 20;
    let mut world = World::new((1..=servers).map(|it| lending(it, lent)), impatient());
    let full = options(code.0, code.1, Reserve::Full);
    let store = PageStore::remote(&world.cluster, REGION, PAGES * 4096, 4096, &full);
    let store = store.expect("it fits");
    let mut io = queue(&world.cluster);
    let model = odd_pages(4096, 0..PAGES);
    for page in (0..PAGES).step_by(16) {
        let run = &model[page as usize * 4096..][..16 * 4096];
        write_pages(&mut io, &store, page, run);
    }
    world.repair();
    assert!(store.stats().sealed_bytes > 0);
    (world, store, io, model)
}

/// Writes pages of a region at random while others take all that goes back, also within a turn of
/// the repairs. Returns the longest time that a write took.
fn write_amid_others(code: (u8, u8), servers: u64, rounds: u64) -> Duration {
    let mut world = reserved(code, servers);
    let others = Others::of(&world.0);
    let has_ended = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !has_ended.load(Ordering::Relaxed) {
                others.take_all();
                thread::yield_now();
            }
        });
        // Set by a failure, too.
        let _end = Defer(|| has_ended.store(true, Ordering::Relaxed));
        write_at_random(&mut world, &others, code, rounds)
    })
}

/// Calls a function when it is dropped.
struct Defer<F: Fn()>(F);

impl<F: Fn()> Drop for Defer<F> {
    fn drop(&mut self) {
        self.0();
    }
}

/// Writes pages of a region at random. Others take all that goes back after every turn of the
/// repairs. Returns the longest time that a write took.
fn write_at_random(
    (world, store, io, model): &mut (World, Arc<PageStore>, Queue, Vec<u8>),
    others: &Others,
    code: (u8, u8),
    rounds: u64,
) -> Duration {
    let servers = world.servers.len();
    let mut random = ChaCha8Rng::seed_from_u64(servers as u64);
    others.take_all();
    let mut longest = Duration::ZERO;
    for number in 0..rounds * PAGES {
        let page = random.random_range(0..PAGES);
        let new = odd_page(4096, 5000 + number);
        model[page as usize * 4096..][..4096].copy_from_slice(&new);
        let began = Instant::now();
        io.write_back(store, at(page), new.into(), page);
        while io.in_flight() > 0 {
            for done in poll(io) {
                assert!(done.failed.is_empty(), "{:?}", done.failed);
            }
            world.repairer.turn(&world.cluster);
            others.take_all();
            assert!(
                began.elapsed() < Duration::from_secs(10),
                "{code:?} on {servers}: write {number} of {} never ends: {}",
                rounds * PAGES,
                describe(store)
            );
        }
        longest = longest.max(began.elapsed());
    }
    for page in (0..PAGES).step_by(16) {
        let read = read_pages(io, store, page, 16);
        assert!(read == model[page as usize * 4096..][..16 * 4096]);
    }
    let stats = store.stats();
    assert_eq!((stats.errors, stats.under_protected_bytes), (0, 0));
    longest
}

/// Describes the extents of a region on each server.
pub(super) fn describe(store: &PageStore) -> String {
    let pool = pool(store);
    let sets = pool.groups.sets();
    let mut text = format!("{} sets", sets.len());
    let on = |group: &ExtentGroup| group.good().map(|(_, it)| it.server).collect::<Vec<_>>();
    for (number, set) in sets {
        let state = if set.is_opening {
            "is opened"
        } else {
            "is closed"
        };
        let groups = set
            .groups()
            .iter()
            .filter_map(|&index| pool.groups.get(index));
        let on: Vec<_> = groups.map(|group| on(&group)).collect();
        text += &format!("; set {number} {state}, on {on:?}");
    }
    for (index, group) in (0..).zip(pool.groups.all()) {
        if let Some(group) = group.filter(|group| group.column.is_none()) {
            let free = pool.use_of(index).map_or(0, |it| it.free_bytes);
            text += &format!("; copies on {:?}, {free} free", on(&group));
        }
    }
    let (spares, is_awaited) = (pool.spares_by_server(), pool.is_room_awaited());
    text + &format!("; spares on {spares:?}; room is awaited: {is_awaited}")
}

#[test]
fn writes_of_a_reserved_region_end_whatever_others_take() {
    let rounds = std::env::var("FARPAGE_FULL_ROUNDS").map_or(10, |it| it.parse().expect("number"));
    for code in [(2, 1), (4, 1), (2, 2), (8, 2)] {
        let least = u64::from(code.0 + code.1);
        for servers in least..=least + 2 {
            let longest = write_amid_others(code, servers, rounds);
            println!("{code:?} on {servers} servers: {longest:?} at most");
        }
    }
}

/// Copies cannot be made, since their sources are out of reach: nothing was written to their
/// extents. What goes back is lost, or cleared.
#[test]
fn copies_whose_sources_fail_cost_no_kept_extents() {
    let (mut world, store, _io, _) = reserved((4, 1), 6);
    let others = Others::of(&world);
    others.take_all();
    let before = pool(&store).spare_ids();
    assert!(!before.is_empty());
    for &kept in &before {
        tamper_extent(pool(&store), kept, (0, 1), |bytes| bytes[0] = 7);
    }
    let (number, set) = pool(&store).groups.sets()[0];
    assert!(pool(&store).open_set(number));
    for &column in &set.columns()[..2] {
        let home = pool(&store).groups.home(column);
        let home = home.expect("a column has a home").0;
        world.servers[usize::from(home)].cut();
    }
    for _ in 0..4 {
        world.repairer.turn(&world.cluster);
        others.take_all();
    }
    world.servers.iter().for_each(|server| server.heal());
    world.wait_until_all_answer();
    let groups = pool(&store).groups.all();
    let members = groups.iter().flatten().flat_map(ExtentGroup::members);
    let used: Vec<_> = members.map(|(_, it)| (it.server, it.id)).collect();
    for kept in before.iter().filter(|it| !used.contains(it)) {
        assert!(
            pool(&store).spare_ids().contains(kept),
            "{kept:?} went back"
        );
        let read = |bytes: &mut [u8]| assert_eq!(bytes[0], 7, "{kept:?} went back");
        read_extent(pool(&store), *kept, (0, 1), read);
    }
}
