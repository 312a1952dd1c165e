//! Tests of `debian.rs`: which of the host's sources are used, and names that become arguments.

use super::*;

fn etc(files: &[(&str, &str)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("sources.list.d")).unwrap();
    for (name, text) in files {
        std::fs::write(dir.path().join(name), text).unwrap();
    }
    dir
}

#[test]
fn the_hosts_deb822_sources_are_cut_down_to_the_suite() {
    let dir = etc(&[
        (
            "sources.list.d/debian.sources",
            "Types: deb deb-src\n# a comment\nURIs: http://mirror.example/debian\nSuites: bookworm \
             bookworm-updates bookworm-backports trixie\nComponents: main\nSigned-By:\n -----BEGIN\n .\n x\n\n\
             Types: deb\nURIs: http://mirror.example/sec\nSuites: bookworm-security\nComponents: main\n",
        ),
        (
            "sources.list.d/docker.sources",
            "Types: deb\nURIs: http://d.example\nSuites: bookworm\nComponents: stable\n",
        ),
        (
            "sources.list.d/off.sources",
            "Enabled: no\nTypes: deb\nURIs: http://o.example\nSuites: bookworm\nComponents: main\n",
        ),
        ("sources.list.d/cloud.list", "deb https://c.example/apt cloud-sdk-bookworm main\n"),
    ]);
    let text = host_sources(dir.path(), "bookworm").unwrap();
    assert_eq!(
        text,
        "Types: deb\nURIs: http://mirror.example/debian\nSuites: bookworm bookworm-updates\nComponents: \
         main\nSigned-By: \n -----BEGIN\n .\n x\n\nTypes: deb\nURIs: http://mirror.example/sec\nSuites: \
         bookworm-security\nComponents: main\n"
    );
    assert!(host_sources(dir.path(), "trixie").is_some());
    assert_eq!(host_sources(dir.path(), "jammy"), None);
    assert_eq!(host_sources(dir.path(), "book"), None);
}

#[test]
fn one_line_sources_are_understood() {
    let dir = etc(&[(
        "sources.list",
        "# deb http://x bookworm main\ndeb [arch=amd64,i386 signed-by=/k.gpg lang=en] http://m.example/debian \
         bookworm main contrib # mine\ndeb-src http://m.example/debian bookworm main\ndeb http://m.example/s \
         bookworm-security main\ndeb [broken\ndeb\n",
    )]);
    let text = host_sources(dir.path(), "bookworm").unwrap();
    assert_eq!(
        text,
        "Types: deb\nURIs: http://m.example/debian\nSuites: bookworm\nComponents: main contrib\nArchitectures: \
         amd64 i386\nSigned-By: /k.gpg\n\nTypes: deb\nURIs: http://m.example/s\nSuites: \
         bookworm-security\nComponents: main\n"
    );
    assert_eq!(host_sources(&dir.path().join("nothing"), "bookworm"), None);
}

#[test]
fn names_cannot_be_options() {
    let names = |suite: &str, package: &str| check(suite, &[package.to_owned()]).map_err(|e| e.to_string());
    assert_eq!(names("bookworm", "libstdc++6"), Ok(()));
    assert!(names("--help", "x").unwrap_err().contains("not the name of a suite"));
    assert!(names("a/b", "x").is_err() && names("", "x").is_err());
    for bad in ["-x", "a,b", "a b", "", "?essential", "./x.deb"] {
        assert!(names("bookworm", bad).unwrap_err().contains("include"), "{bad} was taken");
    }
}

#[test]
fn only_settings_of_the_mirror_are_taken() {
    let dump = "APT::Architecture \"amd64\";\nAcquire::Check-Date \"false\";\nAcquire::http::Proxy::x \
                \"y\";\nDPkg::Post-Invoke:: \"rm -rf /\";\n";
    assert_eq!(pick_settings(dump), ["Acquire::Check-Date \"false\";"]);
}

#[test]
fn nothing_of_the_hosts_access_stays_in_the_tree() {
    let dir = tempfile::tempdir().unwrap();
    let put = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    put("usr/bin/sh", "");
    put("usr/share/keyrings/there.gpg", "");
    put("etc/apt/apt.conf.d/99mmdebstrap", "Acquire::http::Proxy \"http://u:secret@p:1\";\n");
    put("etc/apt/sources.list.d/vendor.list", "deb http://v.example/x bookworm main\n");
    put(
        "etc/apt/sources.list.d/0000hearth.sources",
        "Types: deb\nURIs: https://u:secret@m.example/debian http://u:p@ss@n.example:80 file:/srv/mirror\nSuites: \
         bookworm bookworm-updates\nComponents: main\nSigned-By: /usr/share/keyrings/there.gpg \
         /etc/host/secret.gpg\nProxy: http://secret\n\nTypes: deb\nURIs: http://s.example/\nSuites: \
         bookworm-security\nComponents: main\nSigned-By: /etc/host/secret.gpg\n\nTypes: deb\nURIs: \
         http://k.example/\nSuites: bookworm\nComponents: main\nSigned-By:\n -----BEGIN\n .\n x\n\nTypes: \
         deb\nURIs: file:/srv/mirror\nSuites: bookworm\nComponents: main\n",
    );
    tidy(dir.path(), "bookworm").unwrap();
    let list = dir.path().join("etc/apt/sources.list.d");
    let mut names: Vec<_> = std::fs::read_dir(&list).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["base.sources", "vendor.list"]);
    assert_eq!(
        std::fs::read_to_string(list.join("base.sources")).unwrap(),
        "Types: deb\nURIs: https://m.example/debian http://n.example:80\nSuites: bookworm \
         bookworm-updates\nComponents: main\nSigned-By: /usr/share/keyrings/there.gpg\n\nTypes: deb\nURIs: \
         http://s.example/\nSuites: bookworm-security\nComponents: main\n\nTypes: deb\nURIs: \
         http://k.example/\nSuites: bookworm\nComponents: main\nSigned-By: \n -----BEGIN\n .\n x\n"
    );
    assert!(!dir.path().join("etc/apt/apt.conf.d/99mmdebstrap").exists());
}

#[test]
fn what_may_hold_a_password_is_readable_by_its_owner_only() {
    let dir = tempfile::tempdir().unwrap();
    let path = write_secret(dir.path(), "x.conf", "a").unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(std::fs::read_to_string(path).unwrap(), "a\n");
}
