//! Literal centroids and midpoints.

use turboquant::{codebook::Codebook, layout::head_dims};

/// The upper half; the grid is symmetric.
fn positive(codebook: &Codebook) -> &[f32] {
    &codebook.centroids()[codebook.centroids().len() / 2..]
}

#[test]
fn centroids_have_vllms_bits() {
    let check = |head_dim, bits, golden: &[u32]| {
        let codebook = Codebook::shared(head_dim, bits);
        let ours: Vec<u32> = positive(&codebook).iter().map(|c| c.to_bits()).collect();
        assert_eq!(ours, golden, "head_dim {head_dim}, {bits} bits");
    };
    check(64, 3, &[0x3cfadcfb, 0x3dc171fc, 0x3e2bed53, 0x3e899f54]);
    check(128, 3, &[0x3cb16317, 0x3d88c955, 0x3df3243d, 0x3e42a09f]);
    check(256, 3, &[0x3c7adcfb, 0x3d4171fc, 0x3dabed53, 0x3e099f54]);
    let d64 =
        [0x3c83828a, 0x3d46b9ff, 0x3da82948, 0x3df1444a, 0x3e20cd0c, 0x3e4f16c0, 0x3e846170, 0x3eaec76e];
    let d128 =
        [0x3c39fbae, 0x3d0c8559, 0x3d6dd0e1, 0x3daa99f2, 0x3de3682b, 0x3e126f17, 0x3e3b36e7, 0x3e772cc4];
    let d256 =
        [0x3c03828a, 0x3cc6b9ff, 0x3d282948, 0x3d71444a, 0x3da0cd0c, 0x3dcf16c0, 0x3e046170, 0x3e2ec76e];
    check(64, 4, &d64);
    check(128, 4, &d128);
    check(256, 4, &d256);
}

#[test]
#[expect(clippy::excessive_precision, reason = "decimals as published; each names one f32")]
fn centroids_of_other_widths_follow_the_same_recipe() {
    let check = |head_dim, bits, golden: &[f32]| {
        assert_eq!(positive(&Codebook::shared(head_dim, bits)), golden, "head_dim {head_dim}, {bits} bits");
    };
    check(80, 3, &[0.0273899976, 0.0844837353, 0.150172085, 0.240416393]);
    check(96, 3, &[0.0250035338, 0.0771227479, 0.137087733, 0.21946913]);
    check(192, 3, &[0.0176801682, 0.054534018, 0.0969356671, 0.155188113]);
    check(512, 3, &[0.0108268475, 0.0333951302, 0.0593607314, 0.0950329229]);
    let d80 = [
        0.014358649,
        0.0433951244,
        0.0734414086,
        0.10536892,
        0.14045386,
        0.180884674,
        0.231259421,
        0.305326372,
    ];
    let d96 = [
        0.0131075932,
        0.0396141484,
        0.0670425296,
        0.0961882174,
        0.128216252,
        0.165124372,
        0.211109996,
        0.278723568,
    ];
    let d192 = [
        0.00926846825,
        0.0280114319,
        0.0474062264,
        0.0680153444,
        0.0906625837,
        0.116760559,
        0.149277315,
        0.197087333,
    ];
    let d512 = [
        0.00567575451,
        0.0171534289,
        0.0290302653,
        0.0416507199,
        0.0555192642,
        0.0715009496,
        0.0914133117,
        0.120690852,
    ];
    check(80, 4, &d80);
    check(96, 4, &d96);
    check(192, 4, &d192);
    check(512, 4, &d512);
}

#[test]
#[expect(clippy::excessive_precision, reason = "decimals as published; each names one f32")]
fn midpoints_are_taken_in_f32() {
    let check = |head_dim, bits, golden: &[f32]| {
        let codebook = Codebook::shared(head_dim, bits);
        let midpoints = codebook.midpoints();
        let centre = midpoints.len() / 2;
        assert_eq!(&midpoints[centre..], golden, "head_dim {head_dim}, {bits} bits");
        for (below, above) in midpoints[..centre].iter().rev().zip(&midpoints[centre + 1..]) {
            assert_eq!(*below, -above);
        }
    };
    check(64, 3, &[0.0, 0.0625393167, 0.131176591, 0.218345612]);
    check(128, 3, &[0.0, 0.0442219786, 0.0927558616, 0.154393658]);
    check(256, 3, &[0.0, 0.0312696584, 0.0655882955, 0.109172806]);
    let d64 =
        [0.0, 0.0322853401, 0.0653136075, 0.09995801, 0.137419105, 0.179633707, 0.230395555, 0.299960583];
    let d128 =
        [0.0, 0.0228291824, 0.0461836942, 0.0706809834, 0.0971699804, 0.12702021, 0.162914261, 0.212104172];
    let d256 =
        [0.0, 0.0161426701, 0.0326568037, 0.049979005, 0.0687095523, 0.0898168534, 0.115197778, 0.149980292];
    check(64, 4, &d64);
    check(128, 4, &d128);
    check(256, 4, &d256);
}

/// Against the optimum for N(0, 1), found elsewhere.
#[test]
fn every_width_has_the_gaussian_grid_at_its_scale() {
    let three = [0.24509, 0.75601, 1.34391, 2.15195];
    let four = [0.1284, 0.38805, 0.65676, 0.94234, 1.25623, 1.61805, 2.06902, 2.73259];
    for head_dim in head_dims() {
        let sigma = 1.0 / (head_dim as f64).sqrt();
        for (bits, optimum) in [(3, &three[..]), (4, &four[..])] {
            let codebook = Codebook::shared(head_dim, bits);
            let (centroids, midpoints) = (codebook.centroids(), codebook.midpoints());
            assert_eq!((centroids.len(), midpoints.len()), (1 << bits, (1 << bits) - 1));
            assert!(centroids.is_sorted_by(|a, b| a < b) && midpoints.is_sorted_by(|a, b| a < b));
            for (c, optimum) in positive(&codebook).iter().zip(optimum) {
                let at_unit_scale = f64::from(*c) / sigma;
                assert!(
                    (at_unit_scale - optimum).abs() < 0.003,
                    "{head_dim}, {bits}: {at_unit_scale} {optimum}"
                );
            }
            for (low, high) in centroids.iter().zip(centroids.iter().rev()) {
                assert_eq!(*low, -high);
            }
        }
        let outermost = Codebook::shared(head_dim, 4).centroids()[15] / sigma as f32;
        assert!((2.64..=2.74).contains(&outermost));
    }
}
