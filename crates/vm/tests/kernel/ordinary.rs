//! Regions that are ordinary memory before their faults are caught.

use farpage_vm::{AddressSpace, Geometry, Shard};

use crate::common::{BOTH, Moves, byte, events, geometry, numbers, pages, set, space};

const PAGE: usize = 65536;
const KERNEL_PAGE: usize = 4096;

#[test]
fn pages_of_ordinary_memory_stay_and_leave_once_faults_are_caught() {
    for transfer in BOTH {
        let space = space(transfer, 2);
        let geometry = Geometry {
            ordinary: true,
            ..geometry(4 * PAGE, PAGE)
        };
        let base = space.map(geometry).unwrap().address;
        // Touched without a fault: the first page whole, the third in part.
        for at in (0..PAGE).step_by(KERNEL_PAGE) {
            set(base + at, 1);
        }
        set(base + 2 * PAGE + 3 * KERNEL_PAGE, 3);
        assert!(events(&space, 0).is_empty() && events(&space, 1).is_empty());
        let mut there = Vec::new();
        space.present(base..base + 4 * PAGE, &mut there);
        let part = base + 2 * PAGE + 3 * KERNEL_PAGE;
        assert_eq!(there, [base..base + PAGE, part..part + KERNEL_PAGE]);
        // What is dropped is zeros.
        set(base + 3 * PAGE, 4);
        space.drop_memory(base + 3 * PAGE..base + 4 * PAGE).unwrap();
        assert_eq!(byte(base + 3 * PAGE), 0);
        space.drop_memory(base + 3 * PAGE..base + 4 * PAGE).unwrap();

        space.begin_paging(base, geometry).unwrap();
        let third = base + 2 * PAGE;
        assert_eq!(byte(part), 3);
        for hole in [third..part, part + KERNEL_PAGE..third + PAGE] {
            space.put_zeros(Shard(0), hole).unwrap();
        }
        there.clear();
        space.present(base..base + 4 * PAGE, &mut there);
        assert_eq!(there, [base..base + PAGE, third..third + PAGE]);
        let frame = space.move_out(pages(0, base, PAGE, 1)).unwrap();
        assert!(
            frame
                .as_ref()
                .iter()
                .step_by(KERNEL_PAGE)
                .all(|&byte| byte == 1)
        );
        let frame = space.move_out(pages(0, third, PAGE, 1)).unwrap();
        let kernel_pages = numbers(&frame.as_ref()[4 * KERNEL_PAGE..], KERNEL_PAGE);
        assert!(frame.as_ref()[3 * KERNEL_PAGE] == 3 && kernel_pages.iter().all(|&byte| byte == 0));
        space.move_in(0, third, PAGE, frame).unwrap();
        assert_eq!(byte(part), 3);
        // An absent page is a fault now.
        std::thread::scope(|scope| {
            scope.spawn(|| set(base + PAGE, 9));
            let fault = loop {
                if let Some(fault) = events(&space, 1).faults.pop() {
                    break fault;
                }
                std::thread::yield_now();
            };
            assert_eq!(fault.address / PAGE, base / PAGE + 1);
            let frame = space.new_frame(PAGE, 1).unwrap();
            space.move_in(1, base + PAGE, PAGE, frame).unwrap();
        });
        assert_eq!(byte(base + PAGE), 9);
        space.unmap(base, geometry);
    }
}
