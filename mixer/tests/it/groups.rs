//! Fear: that a group of parameters is misread.

use mixer::Curriculum;

use crate::curriculum::{WHOLE, edited, parse};

#[test]
fn groups_of_parameters_arrive() {
    let c = parse(WHOLE);
    let groups = "clip = 2\n[[optimizer.group]]\nparams = \"embed*\"\nlr_scale = 0.5\n\
                  [[optimizer.group]]\nparams = \"*.mlp.*\"\nlr_scale = 1\nweight_decay = 0.3\n";
    let grouped = parse(&edited("clip = 2", groups));
    let found = grouped.optimizer.groups.iter();
    let found: Vec<_> =
        found.map(|it| (it.params.as_str(), it.lr_scale, it.weight_decay)).collect();
    assert_eq!(found, [("embed*", 0.5, None), ("*.mlp.*", 1.0, Some(0.3))]);
    assert_eq!(parse(&grouped.canonical()).canonical(), grouped.canonical());
    assert_eq!(grouped.difference(&c)[0].key, "optimizer.group.1");
    let refused: [(&str, &str); 4] = [
        ("{ lr_scale = 2 }", "params"),
        ("{ params = \"a\", lr = 2 }", "lr_scale"),
        ("{ params = \"a\", lr_scale = -2 }", "-2"),
        ("{ params = \"a\" }", "neither `lr_scale`"),
    ];
    for (group, said) in refused {
        let text = edited("clip = 2", &format!("group = [{group}]"));
        let fault = Curriculum::parse(&text, "c.toml").expect_err(group).to_string();
        assert!(fault.contains("c.toml:20:") && fault.contains(said), "{fault}");
    }
}
