//! Tests of settings: which one holds, and what is refused.

use clap::CommandFactory;

use super::*;

fn settle(arguments: &[&str], file: Option<&str>) -> Result<Config, ConfigError> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("memserver.toml");
    let mut command_line = vec!["farpage-memserver", "serve"];
    command_line.extend(arguments);
    if let Some(text) = file {
        fs::write(&path, text).unwrap();
        command_line.extend(["--config", path.to_str().unwrap()]);
    }
    let cli = Cli::try_parse_from(command_line).unwrap();
    let Command::Serve(flags) = &cli.command else {
        panic!("not serve")
    };
    Config::settle(flags, &cli.log)
}

#[test]
fn a_flag_beats_the_file_and_the_file_beats_the_default() {
    let file = "listen = ['tcp://127.0.0.1:1']\ncapacity = '3GiB'\nlease = '7s'\nlog = 'json'\n";
    let config = settle(&["--capacity", "2GiB"], Some(file)).unwrap();
    assert_eq!(config.capacity_bytes, 2 << 30);
    assert_eq!(config.lease, Duration::from_secs(7));
    assert_eq!(config.grace, DEFAULT_GRACE);
    assert_eq!(config.log, LogFormat::Json);
    assert_eq!(config.listen[0].to_string(), "tcp://127.0.0.1:1");
    let config = settle(
        &[
            "--listen",
            "tcp://127.0.0.1:2,shm:///tmp/x",
            "--log",
            "human",
        ],
        Some(file),
    )
    .unwrap();
    assert_eq!(config.listen.len(), 2);
    assert_eq!(config.log, LogFormat::Human);
}

#[test]
fn a_size_or_a_time_that_is_none_is_repeated_beside_an_example() {
    for (key, example) in [
        ("capacity", "`64KiB`"),
        ("capacity-per-address", "`64KiB`"),
        ("memory", "`64KiB`"),
        ("lease", "`5s`"),
        ("reconnect-grace", "`5s`"),
        ("grace", "`5s`"),
        ("drain-timeout", "`5s`"),
    ] {
        let flag = format!("--{key}=nonsense");
        let flag = Cli::try_parse_from(["farpage-memserver", "serve", &flag]).unwrap_err();
        let file = settle(&[], Some(&format!("{key} = 'nonsense'"))).unwrap_err();
        for error in [flag.to_string(), file.to_string()] {
            assert!(
                error.contains("`nonsense` is no") && error.contains(example),
                "{error}"
            );
            assert!(error.contains(key), "{error}");
        }
    }
    for (wrong, right) in [("capacity", "8GiB"), ("lease", "60s")] {
        let error = settle(&[], Some(&format!("{wrong} = true"))).unwrap_err();
        assert!(error.to_string().contains(right), "{error}");
    }
}

#[test]
fn the_file_takes_what_the_flags_take() {
    let file = "capacity = 4194304\ncapacity-per-address = '2 MiB'\nlease = 60\nreconnect-grace = '2'\ngrace = 0.5\ndrain-timeout = '30s'\nlisten = 'tcp://127.0.0.1:1,tcp://127.0.0.1:2'";
    let flags = [
        "--capacity=4194304",
        "--capacity-per-address=2 MiB",
        "--lease=60",
        "--reconnect-grace=2",
        "--grace=0.5",
        "--drain-timeout=30s",
        "--listen=tcp://127.0.0.1:1,tcp://127.0.0.1:2",
    ];
    let (file, flags) = (settle(&[], Some(file)), settle(&flags, None));
    let read = |config: Result<Config, ConfigError>| {
        let config = config.expect("all of it is right");
        let sizes = (config.capacity_bytes, config.capacity_per_address);
        assert_eq!(config.drain_timeout, Duration::from_secs(30));
        let times = (config.lease, config.reconnect_grace, config.grace);
        (sizes, times, config.listen)
    };
    let (sizes, times, listen) = read(file);
    assert_eq!(sizes, (4 << 20, Some(2 << 20)));
    let (lease, two) = (Duration::from_secs(60), Duration::from_secs(2));
    assert_eq!(times, (lease, two, Duration::from_millis(500)));
    assert_eq!(listen.len(), 2);
    assert_eq!((sizes, times, listen), read(flags));
}

#[test]
fn every_variable_of_a_flag_is_known() {
    let mut command = Cli::command();
    command.build();
    let of = |command: &clap::Command| {
        let names = command.get_arguments().filter_map(|it| it.get_env());
        names.map(|it| it.to_string_lossy().into_owned()).collect()
    };
    let variables: Vec<Vec<String>> = command.get_subcommands().map(of).collect();
    let variables = variables.concat();
    assert!(variables.len() > 20, "{variables:?}");
    for name in variables {
        assert!(farpage_wire::is_known(&name), "{name}");
    }
}

#[test]
fn a_key_that_nobody_knows_is_an_error_that_names_it() {
    let error = settle(&[], Some("capasity = '3GiB'"))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("capasity") && error.contains("memserver.toml"),
        "{error}"
    );
}

#[test]
fn values_that_cannot_work_are_refused() {
    for (arguments, file) in [
        (vec!["--capacity", "0"], None),
        (vec!["--capacity", "2"], None),
        (vec!["--capacity-per-address", "8"], None),
        (vec![], Some("capacity = 64")),
        (vec![], Some("lease = -1")),
        (vec!["--lease", "1ms"], None),
        (vec![], Some("lease = 'soon'")),
        (vec![], Some("listen = ['carrier-pigeon://x']")),
    ] {
        assert!(settle(&arguments, file).is_err(), "{arguments:?} {file:?}");
    }
    let error = settle(&["--capacity", "2"], None).unwrap_err().to_string();
    assert!(
        error.contains("capacity is 2 bytes") && error.contains("8GiB"),
        "{error}"
    );
    assert!(Cli::try_parse_from(["farpage-memserver", "serve", "--capacity", "many"]).is_err());
}

#[test]
fn a_limit_that_lets_nobody_in_is_refused_and_says_what_to_give() {
    for limit in [
        "extents-per-address",
        "connections-per-address",
        "connections-per-client",
    ] {
        let flag = settle(&[&format!("--{limit}=0")], None);
        let file = settle(&[], Some(&format!("{limit} = 0")));
        for refused in [flag, file] {
            let error = refused.expect_err(limit).to_string();
            let advice = format!("{limit} is 0: no client could");
            assert!(error.contains(&advice), "{error}");
        }
        let one = format!("--{limit}=1");
        assert!(settle(&[&one], None).is_ok(), "{limit}");
    }
}

#[test]
fn shares_have_a_weight_and_need_a_server_that_runs_short_of_memory() {
    let tiers = ["--memory=16MiB", "--spill=/var/tmp", "--capacity=1GiB"];
    let listen = "--listen=tcp://127.0.0.1:0";
    let file = "share = ['10.0.0.7=4', 'user:1000=2']";
    let expected = [
        (Origin::from(IpAddr::from([10, 0, 0, 7])), 4),
        (Origin::User(1000), 2),
    ]
    .map(|(of, weight)| ShareWeight { of, weight });
    let arguments = [&tiers[..], &[listen]].concat();
    assert_eq!(settle(&arguments, Some(file)).unwrap().shares, expected);
    let flag = [&arguments[..], &["--share=10.0.0.7=4,user:1000=2"]].concat();
    assert_eq!(settle(&flag, None).unwrap().shares, expected);
    let error = settle(&[listen], Some(file)).unwrap_err().to_string();
    assert!(error.contains("--spill"), "{error}");
    for wrong in [
        "10.0.0.7",
        "10.0.0.7=0",
        "10.0.0=1",
        "user:x=1",
        "=1",
        "::1=many",
    ] {
        let file = format!("share = ['{wrong}']");
        let error = settle(&arguments, Some(&file)).unwrap_err().to_string();
        assert!(
            error.contains("10.0.0.7=4") && error.contains(wrong),
            "{error}"
        );
    }
}

#[test]
fn without_a_capacity_half_of_the_available_memory_is_lent() {
    let config = settle(&["--listen", "tcp://127.0.0.1:0"], None).unwrap();
    assert!(config.capacity_is_default);
    let half = available_bytes() / 2;
    assert!(
        config.capacity_bytes.abs_diff(half) < half / 2,
        "{} against {half}",
        config.capacity_bytes
    );
}
