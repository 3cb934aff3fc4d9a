//! READs of pages that are decoded: with damage at rest and on the way, late, and in a signal
//! handler.

use farpage_fabric::{ChannelError, Since};

use super::{
    copies::{World, impatient, impatient_within},
    parity::{SealedWorld, flip, home_of, options, sealed_part},
    *,
};

/// Returns a page whose following pages, `pages` in all, lie behind it in a column.
fn sealed_run(it: &SealedWorld, pages: u64) -> u64 {
    let sealed = it.sealed_pages();
    let column = |page: u64| place_of(&it.store, page).0.extent;
    let is_run = |page: &&u64| {
        (**page..**page + pages)
            .all(|next| sealed.contains(&next) && column(next) == column(**page))
    };
    *sealed.iter().find(is_run).expect("a column has many pages")
}

/// The home of a run of pages is dead, or the home of one of the pages is damaged; and each other
/// extent of the set is damaged in turn.
#[test]
fn damage_beside_a_lost_or_damaged_column_is_decoded_around() {
    for (pages, is_dead) in [(1, true), (4, true), (1, false), (4, false)] {
        for other in 0..5 {
            let mut it = SealedWorld::new(6, (4, 2), impatient());
            let first = sealed_run(&it, pages);
            let damaged = first + pages / 2;
            let view = pool(&it.store)
                .groups
                .set_of(place_of(&it.store, first).0.extent)
                .expect("it has parity");
            let source = view.others().nth(other).expect("a set has six extents");
            flip(&it.store, damaged, source);
            let home = home_of(&it.store, first);
            match is_dead {
                true => {
                    it.kill(usize::from(home.server));
                    it.world.give_up(&it.store, home.server);
                }
                false => flip(&it.store, damaged, home),
            }
            let read = read_pages(&mut it.io, &it.store, first, pages as usize);
            let right = &it.model[first as usize * 4096..][..pages as usize * 4096];
            assert!(read == right, "{pages} pages, {is_dead}, {other}");
            let stats = it.store.stats();
            assert_eq!(stats.errors, 0);
            assert!(stats.failovers > 0, "{stats:?}");
        }
    }
}

/// A set without an extent to spare: only the same sources can be read once more. The seeds are
/// such that no page is damaged twice in a row.
#[test]
fn sources_that_were_damaged_on_their_way_are_read_once_more() {
    for is_dead in [true, false] {
        let config = |server| SimConfig {
            damage_one_in: Some(1000),
            ..SimConfig::new(server)
        };
        let world = World::new((1..=3).map(config), impatient());
        let mut it = SealedWorld::of(world, (2, 1));
        let mut pages = it.sealed_pages();
        let server = home_of(&it.store, pages[0]).server;
        pages.retain(|&page| home_of(&it.store, page).server == server);
        if is_dead {
            it.kill(usize::from(server));
            it.world.give_up(&it.store, server);
        } else {
            (pages.iter()).for_each(|&page| flip(&it.store, page, home_of(&it.store, page)));
            let damaged = |page| read(&mut it.io, &it.store, page).map(drop);
            (pages.iter().copied().map(damaged)).for_each(|read| read.expect("it is decoded"));
        }
        let before = it.store.stats();
        for _ in 0..12 {
            for &page in &pages {
                let bytes = read(&mut it.io, &it.store, page).expect("it is decoded");
                assert!(bytes == it.model[page as usize * 4096..][..4096]);
            }
        }
        let after = it.store.stats();
        let decoded = after.failovers - before.failovers;
        assert_eq!(decoded, 12 * pages.len() as u64);
        let damaged = after.corrupt - before.corrupt;
        println!("{damaged} of {decoded} decodings were damaged on the way");
        assert!(damaged > 0);
    }
}

/// Three extents of a set with two parities are damaged.
#[test]
fn more_damage_than_parities_is_an_error_that_says_so() {
    for is_dead in [true, false] {
        let mut it = SealedWorld::new(6, (4, 2), impatient());
        let page = sealed_run(&it, 1);
        let (place, len) = place_of(&it.store, page);
        let set = pool(&it.store).groups.set_of(place.extent);
        // Bytes that differ, so that no sum is right.
        for (number, source) in set.expect("it has parity").others().take(2).enumerate() {
            let change = |bytes: &mut [u8]| bytes[20 + number] ^= 4;
            let extent = (source.server, source.id);
            tamper_extent(pool(&it.store), extent, (place.offset, len), change);
        }
        let home = home_of(&it.store, page);
        match is_dead {
            true => {
                it.kill(usize::from(home.server));
                it.world.give_up(&it.store, home.server);
            }
            false => flip(&it.store, page, home),
        }
        let error = read(&mut it.io, &it.store, page).expect_err("it is lost");
        assert!(matches!(error, StoreError::Corrupt { .. }), "{error:?}");
    }
}

#[test]
fn a_decoding_ends_with_its_deadline() {
    let deadline = Duration::from_secs(2);
    let mut it = SealedWorld::new(5, (4, 1), impatient_within(deadline.as_millis() as u64));
    let page = sealed_run(&it, 16);
    let home = home_of(&it.store, page);
    it.kill(usize::from(home.server));
    it.world.give_up(&it.store, home.server);
    let began = Since::now();
    // The sources of the last runs find no buffers before it is too late.
    for number in 0..40 {
        let frame = vec![0; 16 * 4096].into();
        it.io.fill(&it.store, at(page), frame, number);
    }
    wait_until("the deadline never passes", || began.elapsed() >= deadline);
    let (mut filled, mut late) = (0, 0);
    while filled + late < 40 {
        for done in some(&mut it.io) {
            match &done.failed[..] {
                [] => filled += 1,
                [(_, StoreError::Remote { source, .. }), ..] => {
                    assert!(matches!(source, ChannelError::TimedOut { .. }), "{source}");
                    late += 1;
                }
                failed => panic!("{failed:?}"),
            }
        }
    }
    assert!(filled > 0 && late > 0, "{filled} filled, {late} late");
    // The next request has time.
    let bytes = read(&mut it.io, &it.store, page).expect("it is decoded");
    assert!(bytes == it.model[page as usize * 4096..][..4096]);
}

#[test]
fn a_prepared_queue_decodes_without_asking_for_memory() {
    let mut world = World::of(5, impatient());
    let options = options(4, 1, Reserve::OnDemand);
    let store = PageStore::remote(&world.cluster, REGION, 512 * 4096, 4096, &options);
    let store = store.expect("there is no reservation");
    let mut io = queue(&world.cluster);
    let model = odd_pages(4096, 0..512);
    write_pages(&mut io, &store, 0, &model);
    world.repair();
    assert!(sealed_part(&store) > 0.5);
    let mut passive = passive_queue(&world.cluster);
    for pages in [1, 16, 1, 2] {
        passive.prepare(&store, pages);
    }
    world.servers[2].kill();
    world.give_up(&store, 2);
    let before = world.cluster.registered_memory().acquisitions;
    for page in (0..512).step_by(16) {
        let right = &model[page as usize * 4096..][..16 * 4096];
        assert!(read_pages(&mut passive, &store, page, 16) == right);
        assert!(read_pages(&mut passive, &store, page, 1) == right[..4096]);
    }
    assert!(store.stats().failovers > 0);
    assert_eq!(world.cluster.registered_memory().acquisitions, before);
}

/// Polls until a run is filled. Returns the number of polls.
fn polls_of_fill(it: &mut SealedWorld, page: u64, pages: u64) -> usize {
    let frame = vec![0; pages as usize * 4096].into();
    it.io.fill(&it.store, at(page), frame, page);
    let polls = (1..100_000).find(|_| {
        let done = poll(&mut it.io);
        done.iter().for_each(|done| {
            let right = &it.model[page as usize * 4096..][..pages as usize * 4096];
            assert!(done.failed.is_empty() && done.frame.bytes == right);
        });
        !done.is_empty()
    });
    polls.expect("a fill ends")
}

#[test]
fn all_sources_are_read_at_once() {
    for (pages, code) in [(1, (4, 1)), (16, (8, 2))] {
        let config = |server| SimConfig {
            delay_steps: 1,
            bytes_per_step: Some(64),
            ..SimConfig::new(server)
        };
        let servers = u64::from(code.0 + code.1);
        let mut it = SealedWorld::of(World::new((1..=servers).map(config), impatient()), code);
        let page = sealed_run(&it, pages);
        let healthy = polls_of_fill(&mut it, page, pages);
        let home = home_of(&it.store, page).server;
        it.kill(usize::from(home));
        it.world.give_up(&it.store, home);
        let decoded = polls_of_fill(&mut it, page, pages);
        assert!(it.store.stats().failovers > 0);
        assert!(decoded <= healthy + 2, "{decoded} polls against {healthy}");
    }
}
