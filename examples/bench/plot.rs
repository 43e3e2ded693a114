//! Time against length (suite dense) and against density (suite sparse), as SVG.

use crate::{Failure, Row};
use plotters::prelude::*;
use std::collections::BTreeMap;
use std::path::Path;

/// A curve: its name, and points (x, milliseconds).
type Curves = BTreeMap<String, Vec<(f64, f64)>>;

/// Refuses a name that says another format than SVG, before anything is measured.
pub(crate) fn check(file: &Path) -> Result<(), Failure> {
    if file.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("svg")) {
        return Ok(());
    }
    let (name, instead) = (file.display(), file.with_extension("svg"));
    Err(format!("--plot is {name} but plots are SVG; give a name that ends in .svg: {}", instead.display())
        .into())
}

pub(crate) fn draw(rows: &[Row], file: &Path) -> Result<(), Failure> {
    let by_density = rows.iter().any(|row| row.suite == "sparse");
    let (x_name, curves) = if by_density { ("density", densities(rows)) } else { ("tokens", lengths(rows)) };
    let points: Vec<(f64, f64)> = curves.values().flatten().copied().collect();
    if points.is_empty() {
        return Err("there is nothing to draw: the suites dense and sparse have plots".into());
    }
    let range = |values: Vec<f64>| {
        let low = values.iter().copied().fold(f64::INFINITY, f64::min);
        let high = values.iter().copied().fold(0.0, f64::max);
        low * 0.9..high * 1.1
    };
    let area = SVGBackend::new(file, (900, 560)).into_drawing_area();
    area.fill(&WHITE)?;
    let adapter = rows.first().map_or("", |row| row.adapter.as_str());
    let mut chart = ChartBuilder::on(&area)
        .caption(format!("flexattn on {adapter}"), ("sans-serif", 18))
        .margin(16)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(
            range(points.iter().map(|point| point.0).collect()).log_scale(),
            range(points.iter().map(|point| point.1).collect()).log_scale(),
        )?;
    let percent = |x: &f64| format!("{} %", (x * 1e4).round() / 100.0);
    let number = |x: &f64| x.to_string();
    let shown: &dyn Fn(&f64) -> String = if by_density { &percent } else { &number };
    chart
        .configure_mesh()
        .x_desc(x_name)
        .y_desc("milliseconds")
        .x_label_formatter(shown)
        .y_label_formatter(&number)
        .draw()?;
    for (number, (name, points)) in curves.into_iter().enumerate() {
        let color = Palette99::pick(number).to_rgba();
        chart
            .draw_series(LineSeries::new(points, color.stroke_width(2)).point_size(3))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .border_style(BLACK)
        .background_style(WHITE)
        .draw()?;
    area.present()?;
    Ok(())
}

fn densities(rows: &[Row]) -> Curves {
    let mut curves = Curves::new();
    for row in rows {
        curves.entry(row.tier.clone()).or_default().push((row.density, row.ms));
        if let Some(baseline) = row.baseline_ms {
            curves.entry(format!("unfused, beside {}", row.tier)).or_default().push((row.density, baseline));
        }
    }
    sorted(curves)
}

fn lengths(rows: &[Row]) -> Curves {
    let mut curves = Curves::new();
    for row in
        rows.iter().filter(|row| row.head_dim == 64 && row.dtype == "f32" && !row.case.starts_with("unfused"))
    {
        let length = row.kv_len as f64;
        curves.entry(format!("{}, {}", row.tier, row.case)).or_default().push((length, row.ms));
        if let Some(baseline) = row.baseline_ms {
            let name = format!("unfused {}, beside {}", row.case, row.tier);
            curves.entry(name).or_default().push((length, baseline));
        }
    }
    sorted(curves)
}

fn sorted(mut curves: Curves) -> Curves {
    for points in curves.values_mut() {
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    curves
}
