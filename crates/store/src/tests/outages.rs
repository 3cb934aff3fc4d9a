//! Copies of which one is out of reach while another one is damaged, or a connection is cut for a
//! moment.

use super::{
    copies::{World, impatient, members_of, raw},
    repairs::tamper_copy,
    *,
};

/// Options under which a silent server is never given up, and operations end soon.
fn patient(deadline_ms: u64) -> ClusterOptions {
    ClusterOptions {
        deadline: Duration::from_millis(deadline_ms),
        dead_after: Duration::from_secs(600),
        ..impatient()
    }
}

/// Reads pages by a lane, and fails if that takes more than 10 s.
fn read_in_time(
    lane: &mut Lane<Piece>,
    store: &Arc<PageStore>,
    pages: usize,
) -> RunCompletion<Piece> {
    let began = Instant::now();
    let done = read_run(lane, store, 0, pages);
    assert!(began.elapsed() < Duration::from_secs(10));
    done
}

#[test]
fn a_damaged_page_whose_other_copy_is_out_of_reach_is_an_error_in_time() {
    for (is_passive, is_dead) in [(false, false), (false, true), (true, false), (true, true)] {
        for (pages, damaged) in [(1, 0), (2, 0), (2, 1)] {
            let mut world = World::of(2, patient(400));
            let store = raw(&world, 8, 2);
            let mut lane = Lane::new(&world.cluster).expect("a lane");
            let bytes = odd_pages(4096, 0..pages);
            assert!(write_run(&mut lane, &store, 0, &bytes).failed.is_empty());
            let members = members_of(&store, 0);
            let near = usize::from(members[damaged].server);
            tamper_copy(&world, &store, 0, members[damaged]);
            let mut lane = match is_passive {
                true => Lane::passive(&world.cluster).expect("a lane"),
                false => lane,
            };
            world.servers[1 - near].cut();
            if is_dead {
                // What a lane does that finds the server silent for too long.
                pool(&store).mark_dead(members[1 - damaged].server, false);
            }
            let done = read_in_time(&mut lane, &store, pages as usize);
            let failed: Vec<_> = done.failed.iter().map(|(page, _)| *page).collect();
            assert_eq!(failed, [at(0)], "{is_passive} {is_dead} {pages}");
            let (_, error) = &done.failed[0];
            let is_typed = matches!(
                error,
                StoreError::Remote { .. } | StoreError::Corrupt { .. }
            );
            assert!(is_typed, "{error:?}");
            if is_dead {
                assert!(matches!(error, StoreError::Corrupt { .. }), "{error:?}");
                continue;
            }
            // The right copy is read as soon as its server answers.
            world.servers[1 - near].heal();
            world.wait_until_all_answer();
            if is_passive {
                lane.reopen();
                let limit = Instant::now() + Duration::from_secs(10);
                while !read_in_time(&mut lane, &store, 1).failed.is_empty() {
                    assert!(Instant::now() < limit, "its channel is never opened");
                }
            }
            let done = read_in_time(&mut lane, &store, pages as usize);
            assert!(done.failed.is_empty(), "{:?}", done.failed);
            assert!(done.frame.bytes == bytes);
        }
    }
}
