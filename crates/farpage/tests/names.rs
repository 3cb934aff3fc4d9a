//! Named regions: who has a name, what an opener finds under it, and how it is removed.
//!
//! The rule it keeps: checks compare what programs see of each other, over shm and tcp if it may
//! differ.

mod common;

use common::{
    Fabric, Memory, array_with, begin, over_fabrics,
    words::{assert_filled, fill},
};
use farpage::{
    CreateError, ElementType, OpenError, RegionOptions, Reserve, error::StoreCreateError,
};
use farpage_store::{NamesError, OpenStoreError};
use farpage_testkit::{KIB, MIB, mix};

const PAGE: usize = 4 * KIB;

#[test]
fn named_arrays_are_listed_and_removed_by_their_owner_alone() {
    let keys = tempfile::tempdir().unwrap();
    over_fabrics(60, 64 * MIB, |memory| {
        let runtime = |user: &str| {
            let builder = memory.builder(MIB, PAGE);
            builder.key_file(keys.path().join(user)).build().unwrap()
        };
        let (ours, theirs) = (runtime("ours"), runtime("theirs"));
        let options = RegionOptions::new().name("field");
        let array = ours.array_with::<u64>(PAGE, options).unwrap();
        array.flush().unwrap();
        let listed = ours.names().unwrap();
        assert_eq!((listed.len(), listed[0].name.as_str()), (1, "field"));
        assert!(listed[0].in_use && listed[0].bytes > 0, "{listed:?}");
        array.close().unwrap();
        assert!(!ours.names().unwrap()[0].in_use);

        assert_eq!(theirs.names().unwrap(), []);
        assert!(matches!(
            theirs.remove("field"),
            Err(NamesError::NotFound { .. })
        ));
        assert!(theirs.open_array::<u64>("field").is_err());
        ours.remove("field").unwrap();
        assert_eq!(ours.names().unwrap(), []);
        assert!(ours.open_array::<u64>("field").is_err());
    });
}

#[test]
fn named_array_takes_little_of_the_server_if_it_is_small_and_few_extents_if_it_is_large() {
    let Some(_watchdog) = begin(60) else { return };
    let memory = Memory::start(Fabric::Shm, 256 * MIB);
    let granted = || memory.server.stat().granted_bytes as usize;
    let runtime = memory.runtime(MIB, PAGE);
    for (i, reserve) in [Reserve::Full, Reserve::OnDemand].into_iter().enumerate() {
        let options = RegionOptions::new().name(i.to_string()).reserve(reserve);
        let before = granted();
        let mut small = runtime.array_with::<u8>(80, options).unwrap();
        small[7] = 9;
        small.close().unwrap();
        let (took, name) = (granted() - before, 2 * 4 * KIB);
        assert!(took <= 128 * KIB + name, "{reserve:?}: {took}");
        let again = runtime.open_array::<u8>(&i.to_string()).unwrap();
        assert_eq!(again[7], 9);
    }
    let before = memory.server.stat().extents;
    let options = RegionOptions::new()
        .name("large")
        .reserve(Reserve::OnDemand);
    let mut large = runtime.array_with::<u64>(32 * MIB / 8, options).unwrap();
    fill(&mut large, 0);
    large.flush().unwrap();
    let extents = memory.server.stat().extents - before;
    assert!(extents <= 16, "{extents} extents for 32 MiB");
    large.close().unwrap();
}

#[test]
fn region_with_an_element_type_tells_it_to_who_opens_it() {
    let Some(_watchdog) = begin(60) else { return };
    let memory = Memory::start(Fabric::Shm, 64 * MIB);
    let runtime = (memory.builder(MIB, PAGE)).build().unwrap();
    let number = ElementType::number("f32").unwrap();
    let foreign = ElementType::foreign("numpy:'<c8'", 8, 4);
    for (name, of) in [("number", &number), ("foreign", &foreign)] {
        let options = RegionOptions::new().name(name).shape([3, 100]);
        let bytes = 300 * of.bytes as usize;
        let region = runtime
            .region_with(bytes, options.element_type(of.clone()))
            .unwrap();
        region.close().unwrap();
        let region = runtime.open_region(name).unwrap();
        let elements = region.elements().unwrap();
        assert_eq!((elements.len, &elements.of), (300, of));
        assert_eq!(region.shape(), [3, 100]);
    }
    let array = runtime.open_array::<f32>("number").unwrap();
    assert_eq!(array.shape(), [3, 100]);
    let error = runtime.open_array::<[f32; 2]>("foreign").unwrap_err();
    assert!(error.to_string().contains("numpy:'<c8'"), "{error}");
    // Bytes have no type and no shape, and a part of an element is not counted.
    assert!(runtime.region(10).unwrap().elements().is_none());
    let options = RegionOptions::new().element_type(foreign);
    let region = runtime.region_with(23, options).unwrap();
    assert_eq!(region.elements().unwrap().len, 2);
    assert!(region.shape().is_empty());
}

#[test]
fn a_name_that_is_taken_is_refused_when_the_array_is_created() {
    over_fabrics(60, 64 * MIB, |memory| {
        let (first, second) = (memory.runtime(MIB, PAGE), memory.runtime(MIB, PAGE));
        let named = || RegionOptions::new().name("field");
        let open = first.array_with::<u64>(PAGE, named()).unwrap();
        // Twice in one program, and in another one, with or without `replace`.
        for runtime in [&first, &second] {
            for replace in [false, true] {
                let refused = runtime.array_with::<u64>(PAGE, named().replace(replace));
                assert!(refused.is_err(), "{refused:?}");
            }
        }
        // A region that was never flushed nor closed: its name is free.
        let closed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
            let _dropped_without_publishing = open;
            panic!("a bug of the program's");
        }));
        assert!(closed.is_err());
        let mut array = second.array_with::<u64>(PAGE, named()).unwrap();
        array.fill(1);
        array.close().unwrap();
        let error = first.array_with::<u64>(PAGE, named()).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("`field`") && text.contains("open it"),
            "{text}"
        );
        let mut array = array_with(&first, PAGE / 2, named().replace(true));
        array.fill(2);
        array.close().unwrap();
        let array = second.open_array::<u64>("field").unwrap();
        assert_eq!((array.len(), array[0]), (PAGE / 2, 2));
    });
}

#[test]
fn named_region_outlives_its_program_and_has_one_owner() {
    over_fabrics(60, 64 * MIB, |memory| {
        let len = 3 * MIB / 8 + 5;
        let runtime = || memory.runtime(MIB, PAGE);
        let missing = runtime().open_array::<u64>("field").unwrap_err();
        assert!(
            matches!(missing, OpenError::Store(OpenStoreError::NotFound { .. })),
            "{missing:?}"
        );

        let mut array = runtime()
            .array_with::<u64>(len, RegionOptions::new().name("field"))
            .unwrap();
        fill(&mut array, 0);
        array.close().unwrap();

        let owner = runtime();
        let mut array = owner.open_array::<u64>("field").unwrap();
        assert_eq!(array.len(), len);
        assert_filled(&array, 0);
        let refused = runtime().open_array::<u64>("field").unwrap_err();
        let in_use = matches!(
            &refused,
            OpenError::Store(OpenStoreError::InUse { name, .. }) if name == "field"
        );
        assert!(in_use, "{refused:?}");
        // Only flushed changes are published.
        array[0] = 1;
        array.flush().unwrap();
        array[len - 1] = 2;
        array.close().unwrap();
        drop(owner);

        let other = runtime();
        let wrong_type = other.open_array::<[u8; 7]>("field").unwrap_err();
        assert!(
            matches!(wrong_type, OpenError::Type { .. }),
            "{wrong_type:?}"
        );
        let array = other.open_array::<u64>("field").unwrap();
        assert_eq!((array[0], array[len - 1]), (1, 2));
        for at in 1..len - 1 {
            assert_eq!(array[at], mix(at as u64), "word {at}");
        }
    });
}

#[test]
fn a_named_array_opens_with_the_element_type_and_length_it_was_created_with() {
    let Some(_watchdog) = begin(60) else { return };
    let memory = Memory::start(Fabric::Shm, 64 * MIB);
    let runtime = memory.runtime(MIB, PAGE);
    let mut words = array_with(&runtime, 6, RegionOptions::new().name("words"));
    words[5] = 7;
    words.close().unwrap();
    let says = [
        ("f32", runtime.open_array::<f32>("words").map(drop)),
        ("f64", runtime.open_array::<f64>("words").map(drop)),
        ("u8", runtime.open_array::<u8>("words").map(drop)),
        (
            "16 bytes, aligned to 8",
            runtime.open_array::<[u64; 2]>("words").map(drop),
        ),
    ];
    for (asked, result) in says {
        let error = result.expect_err(asked).to_string();
        for part in [asked, "6 elements of type u64", "open_region"] {
            assert!(error.contains(part), "{part} is not in: {error}");
        }
    }
    // Refused openings leave the region to the next.
    let bytes = runtime.open_region("words").unwrap();
    assert_eq!((bytes.len(), bytes[40]), (48, 7));
    bytes.close().unwrap();
    assert_eq!(runtime.open_array::<u64>("words").unwrap()[5], 7);

    // An empty array is stored as one byte, which is no word, and still opens as an array of words.
    let none = runtime.array_with::<u64>(0, RegionOptions::new().name("none"));
    none.unwrap().close().unwrap();
    assert_eq!(runtime.open_array::<u64>("none").unwrap().len(), 0);
    assert_eq!(runtime.open_array::<u64>("none").unwrap().shape(), [0]);

    // Bytes have no type: they open as any type whose size divides their length, as in C.
    let bytes = runtime.region_with(48, RegionOptions::new().name("bytes"));
    bytes.unwrap().close().unwrap();
    assert_eq!(runtime.open_array::<f32>("bytes").unwrap().len(), 12);
    let error = runtime.open_array::<[u8; 7]>("bytes").unwrap_err();
    assert!(error.to_string().contains("48 bytes"), "{error}");
}

#[test]
fn names_are_checked_when_an_array_is_created() {
    let Some(_watchdog) = begin(60) else { return };
    let memory = Memory::start(Fabric::Shm, 64 * MIB);
    let runtime = memory.runtime(MIB, PAGE);
    let create = |name: &str| runtime.array_with::<u64>(9, RegionOptions::new().name(name));
    for name in ["", "two\nlines", "bell\u{7}", &"n".repeat(256)] {
        let error = create(name).expect_err(name).to_string();
        for part in ["name", "255", "control"] {
            assert!(error.contains(part), "{part} is not in: {error}");
        }
        assert!(!error.chars().any(char::is_control), "{error:?}");
    }
    for name in [" ", "Feld/Höhe 2", &"n".repeat(255)] {
        create(name).unwrap().close().unwrap();
        assert_eq!(runtime.open_array::<u64>(name).unwrap().len(), 9);
    }
}

#[test]
fn an_array_that_its_own_program_has_open_is_not_removed() {
    over_fabrics(60, 64 * MIB, |memory| {
        let fabric = memory.fabric;
        let (first, second) = (memory.runtime(MIB, PAGE), memory.runtime(MIB, PAGE));
        let named = || RegionOptions::new().name("field");
        let mut array = first.array_with::<u64>(PAGE, named()).unwrap();
        // Before the first publication under the name, and after it.
        for flushed in [false, true] {
            let refused = first.remove("field").unwrap_err();
            assert!(
                matches!(refused, NamesError::Held { .. }),
                "{fabric}, {flushed}: {refused}"
            );
            assert!(refused.to_string().contains("`field` is open"), "{refused}");
            let taken = second.array_with::<u64>(PAGE, named().replace(true));
            let taken = taken.unwrap_err();
            assert!(
                matches!(taken, CreateError::Store(StoreCreateError::InUse { .. })),
                "{fabric}, {flushed}: {taken}"
            );
            let refused = second.remove("field").unwrap_err();
            assert!(
                matches!(refused, NamesError::InUse { .. }),
                "{fabric}, {flushed}: {refused}"
            );
            array[0] = 7;
            array.flush().unwrap();
        }
        array.close().unwrap();
        assert_eq!(second.open_array::<u64>("field").unwrap()[0], 7);
        // A closed region can be removed, and its name is free.
        first.remove("field").unwrap();
        first
            .array_with::<u64>(1, named())
            .unwrap()
            .close()
            .unwrap();
    });
}
