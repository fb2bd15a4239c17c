// Turns answers of Prometheus into the data frames of Grafana, named, in units and in colours, as a panel shows them.
//
// An answer is the `result` of `query_range`, or of `query` for a table. The module knows nothing of how it is drawn.

import {
  applyFieldOverrides,
  FieldType,
  standardTransformers,
  standardTransformersRegistry,
  toDataFrame,
  transformDataFrame,
} from '@grafana/data';
import { lastValueFrom } from 'rxjs';

import { registryOf, withDefaults } from './field_defaults.js';

// Some transformations stand under a second, older name too.
standardTransformersRegistry.setInit(() =>
  [...new Map(Object.values(standardTransformers).map((each) => [each.id, each])).values()].map((transformation) => ({
    id: transformation.id,
    transformation,
  }))
);

const NUMBERS = { NaN: NaN, '+Inf': Infinity, '-Inf': -Infinity };

const numberOf = (text) => NUMBERS[text] ?? Number(text);

// Returns the name of a series as Grafana's Prometheus source gives it.
function nameOf(target, labels) {
  if (target.legendFormat && target.legendFormat !== '__auto') {
    return target.legendFormat.replace(/\{\{\s*(.+?)\s*\}\}/g, (_, label) => labels[label] ?? '');
  }
  const { __name__: name = '', ...others } = labels;
  const shown = Object.entries(others).map(([label, value]) => `${label}="${value}"`);
  return shown.length ? `${name}{${shown.join(', ')}}` : name || target.expr;
}

function rangeFrame(target, series, stepS) {
  return toDataFrame({
    refId: target.refId,
    fields: [
      {
        name: 'Time',
        type: FieldType.time,
        config: { interval: stepS * 1000 },
        values: series.values.map(([seconds]) => seconds * 1000),
      },
      {
        name: 'Value',
        type: FieldType.number,
        labels: series.metric,
        config: { displayNameFromDS: nameOf(target, series.metric) },
        values: series.values.map(([, text]) => numberOf(text)),
      },
    ],
  });
}

function tableFrame(target, found) {
  const labels = [...new Set(found.flatMap((each) => Object.keys(each.metric)))].sort();
  const column = (name, type, values) => ({ name, type, config: {}, values });
  return toDataFrame({
    refId: target.refId,
    fields: [
      column('Time', FieldType.time, found.map((each) => each.value[0] * 1000)),
      ...labels.map((label) => column(label, FieldType.string, found.map((each) => each.metric[label] ?? ''))),
      column('Value', FieldType.number, found.map((each) => numberOf(each.value[1]))),
    ],
  });
}

// Replaces numbers that no axis has by gaps, as Grafana's time series do.
function withGaps(frame) {
  const fields = frame.fields.map((field) =>
    field.type === FieldType.number
      ? { ...field, values: field.values.map((value) => (Number.isFinite(value) ? value : null)) }
      : field
  );
  return { ...frame, fields };
}

// Returns the frames of a panel. `answers` maps the expression of each query to its answer.
export async function framesOf(panel, answers, { theme, stepS, replaceVariables }) {
  let frames = panel.targets.flatMap((target) => {
    const found = answers[target.expr] ?? [];
    if (target.format === 'table') {
      return found.length ? [tableFrame(target, found)] : [];
    }
    return found.map((series) => rangeFrame(target, series, stepS));
  });
  if (panel.transformations?.length) {
    frames = await lastValueFrom(transformDataFrame(panel.transformations, frames));
  }
  frames = panel.type === 'timeseries' ? frames.map(withGaps) : frames;
  return applyFieldOverrides({
    data: frames,
    fieldConfig: withDefaults(panel),
    fieldConfigRegistry: registryOf(panel.type),
    replaceVariables,
    theme,
    timeZone: 'utc',
  });
}
