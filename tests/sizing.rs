//! Fear: that a plan does not read what the benchmarks write.

use crate::support::{Scratch, arg, build, corpus, curriculum, ztrain};

#[test]
fn a_machine_is_measured_and_planned_on() {
    let scratch = Scratch::new();
    let cluster = scratch.path("cluster.toml");
    let store = build(&scratch, &corpus(&scratch, 200, ""), "store");
    let run = curriculum(&scratch, &store, "run.toml", &[]);
    let plan = ["plan", arg(&run), "--cluster", arg(&cluster)];
    ztrain(&plan).fails(2, &["no such cluster", "mi300x-pollara", "ztrain bench gemm"]);
    let plot = scratch.path("gemm.svg");
    let gemm =
        ["bench", "gemm", "--rows", "16,64", "--widths", "64", "--seconds", "0.01", "--json"];
    let named = ["--curriculum", arg(&run), "--out", arg(&cluster), "--plot", arg(&plot)];
    let told = ztrain(&[&gemm[..], &named].concat()).ok();
    let rows: Vec<serde_json::Value> =
        told.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for row in rows.iter().filter(|row| row.get("rows").is_some()) {
        let size = |key: &str| row[key].as_f64().unwrap();
        assert_eq!(size("operations"), 2.0 * size("rows") * size("inner") * size("columns"));
        assert!(size("ours") > 0.0 && size("libtorch") > 0.0 && size("of_peak") <= 1.0, "{row}");
        let aligned = ["rows", "inner", "columns"].iter().all(|key| size(key) % 64.0 == 0.0);
        assert_eq!(row["aligned"].as_bool(), Some(aligned), "{row}");
    }
    assert!(
        rows.iter().any(|row| row["name"] == "head")
            && rows.iter().any(|row| row["name"] == "width less 1")
    );
    assert!(std::fs::read_to_string(&plot).unwrap().contains("90 % of peak"));
    // If half of a description is missing, the error names the benchmark that measures it.
    ztrain(&plan).fails(2, &["no [memory]", "ztrain bench memory"]);
    let memory = ["bench", "memory", "--to", "256K", "--seconds", "0.01", "--out", arg(&cluster)];
    assert!(ztrain(&memory).ok().contains("triad"));
    let none = ["bench", "memory", "--from", "4M", "--to", "1M", "--out", arg(&cluster)];
    ztrain(&none).fails(2, &["no size lies between"]);
    let told = ztrain(&[&plan[..], &["--json"]].concat()).ok();
    let told: serde_json::Value = serde_json::from_str(&told).unwrap();
    let phases = told["sizing"]["phases"].as_array().unwrap();
    assert_eq!(phases.len(), told["needs"]["phases"].as_array().unwrap().len());
    for phase in phases {
        let seconds = phase["time"]["seconds"].as_f64().unwrap();
        let parts = phase["time"]["parts"].as_array().unwrap();
        let sum: f64 = parts.iter().map(|part| part[1].as_f64().unwrap()).sum();
        assert!(seconds > 0.0 && (sum / seconds - 1.0).abs() < 1e-9, "{phase}");
    }
    let shown = ztrain(&plan).ok();
    for word in ["tokens/s", "utilisation", "attention, backward", "not a multiple of 64"] {
        assert!(shown.contains(word), "no {word:?} in {shown}");
    }
    let simulate = ["--simulate", "3"];
    ztrain(&[&plan[..], &simulate].concat()).fails(2, &["how often ranks fail", "[faults]"]);
}

#[test]
fn the_shipped_recipe_is_planned_on_published_figures() {
    let scratch = Scratch::new();
    let plot = scratch.path("month.svg");
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("curricula/phase3.toml");
    let plan = ["plan", arg(&path), "--cluster", "mi300x-pollara"];
    let month = ["--simulate", "30", "--plot", arg(&plot)];
    let told = ztrain(&[&plan[..], &month].concat()).ok();
    for word in ["512 of 1024 ranks are idle", "checkpoint: stalls", "closed form", "goodput"] {
        assert!(told.contains(word), "no {word:?} in {told}");
    }
    assert_eq!(
        told,
        ztrain(&[&plan[..], &month].concat()).ok(),
        "the same month for the same seed"
    );
    assert!(std::fs::read_to_string(&plot).unwrap().contains("goodput"));
}

/// Parts of one phase have their first step behind their name.
#[test]
fn parts_of_a_phase_are_named() {
    let scratch = Scratch::new();
    let curricula = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("curricula");
    std::os::unix::fs::symlink(curricula.join("stubs"), scratch.path("stubs")).unwrap();
    let text = std::fs::read_to_string(curricula.join("phase3.toml")).unwrap();
    let cut = "seq_len = 32_768\ncontext_chunks = 16 #";
    let text = text.replace("seq_len = 32_768", cut) + "[[amendment]]\nstep = 3\ndtype = \"f32\"\n";
    let path = scratch.write("amended.toml", text);
    let cluster = ["--cluster", "mi300x-pollara", "--ranks", "16", "--compare-degrees"];
    let told = ztrain(&[&["plan", arg(&path)], &cluster[..]].concat()).ok();
    for step in [1, 3] {
        for then in [": ", " with --cp 1 --tsp 1: "] {
            let wanted = format!("\nphase pretrain-1 from step {step}{then}");
            assert!(told.contains(&wanted), "no {wanted:?} in {told}");
        }
    }
    for phase in ["pretrain-2", "midtrain-32k"] {
        assert!(told.contains(&format!("\nphase {phase}: ")), "{told}");
    }
}

#[test]
fn operations_are_timed_beside_libtorchs() {
    let scratch = Scratch::new();
    let plot = scratch.path("kernels.svg");
    let kernels = ["bench", "kernels", "--tokens", "16", "--seconds", "0.001", "--dtype", "bf16"];
    let told = ztrain(&[&kernels[..], &["--json", "--plot", arg(&plot)]].concat()).ok();
    let rows: Vec<serde_json::Value> =
        told.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(rows.len() >= 15, "{told}");
    for row in &rows {
        let wide = ["norm", "AdamW", "Muon's momentum", "Muon's step", "squares"];
        let wide = wide.iter().any(|name| row["operation"] == *name);
        assert_eq!(row["dtype"], if wide { "f32" } else { "bf16" }, "{row}");
        assert!(row["bytes"].as_u64().unwrap() > 0, "{row}");
        let seconds = ["ours", "libtorch"].map(|by| row[by].as_f64().unwrap());
        assert!(seconds.iter().all(|seconds| *seconds > 0.0), "{row}");
    }
    assert!(std::fs::read_to_string(&plot).unwrap().contains("bf16, libtorch"));
}

#[test]
fn every_product_of_a_model_has_one_outcome() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 100, ""), "store");
    let path = curriculum(&scratch, &store, "run.toml", &[]);
    let hash = ["bench", "gemm", "--hash", "5", "--json"];
    ztrain(&hash).fails(2, &["--curriculum"]);
    let told = ztrain(&[&hash[..], &["--curriculum", arg(&path)]].concat()).ok();
    let rows: Vec<serde_json::Value> =
        told.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(rows.iter().all(|row| row["outcomes"] == 1 && row["times"] == 5), "{told}");
    let has = |key: &str, value: &str| rows.iter().any(|row| row[key] == value);
    for way in ["forward", "to the input", "to the weights", "Newton-Schulz"] {
        assert!(has("way", way), "{way}: {told}");
    }
    for (key, value) in [("by", "ours"), ("by", "loop"), ("dtype", "f32"), ("dtype", "bf16")] {
        assert!(has(key, value), "{key} {value}: {told}");
    }
    assert!(rows.iter().all(|row| row["digest"].as_str().unwrap().len() == 16), "{told}");
}

#[test]
fn what_is_no_picture_and_no_cluster_stays() {
    let scratch = Scratch::new();
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("curricula/phase1.toml");
    let file = scratch.path("ledger.jsonl");
    std::fs::write(&file, "{\"kind\":\"head\"}\n").unwrap();
    let (path, kept) = (arg(&path), arg(&file));
    let memory = ["bench", "memory", "--to", "4K", "--seconds", "0.01"];
    let kernels = ["bench", "kernels", "--tokens", "16", "--seconds", "0.001"];
    let plan = ["plan", path, "--cluster", "h100", "--simulate", "1", "--plot", kept];
    for (command, says) in [
        ([&memory[..], &["--plot", kept]].concat(), "neither a page nor a plot"),
        ([&memory[..], &["--out", kept]].concat(), "ledger.jsonl:1"),
        ([&kernels[..], &["--plot", kept]].concat(), "neither a page nor a plot"),
        (plan.to_vec(), "neither a page nor a plot"),
    ] {
        let ran = ztrain(&command);
        assert_eq!(ran.out, "", "found out before anything is computed");
        ran.fails(2, &[says]);
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "{\"kind\":\"head\"}\n");
    }
}
