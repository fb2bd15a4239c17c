// Holds what Grafana adds to the options of a panel before it draws it: the options of a field that every panel has,
// and, for each type of panel, those of its own with their defaults.
//
// Grafana's packages take these from the program around them, so they stand here. The module knows nothing of data.

import { createFieldConfigRegistry, standardFieldConfigEditorRegistry } from '@grafana/data';

const asItIs = (value) => value;

function option(path, defaultValue) {
  return { id: path, path, name: path, defaultValue, process: asItIs, shouldApply: () => true, getItemsCount: () => 0 };
}

standardFieldConfigEditorRegistry.setInit(() =>
  ['unit', 'min', 'max', 'decimals', 'displayName', 'noValue', 'mappings', 'thresholds', 'color', 'links'].map((each) =>
    option(each)
  )
);

const LINES = {
  drawStyle: 'line',
  lineInterpolation: 'linear',
  barAlignment: 0,
  barWidthFactor: 0.6,
  lineWidth: 1,
  fillOpacity: 0,
  gradientMode: 'none',
  spanNulls: false,
  insertNulls: false,
  showPoints: 'auto',
  pointSize: 5,
  stacking: { mode: 'none', group: 'A' },
  axisPlacement: 'auto',
  axisLabel: '',
  axisColorMode: 'text',
  axisBorderShow: false,
  axisCenteredZero: false,
  axisGridShow: true,
  scaleDistribution: { type: 'linear' },
  thresholdsStyle: { mode: 'off' },
  hideFrom: { tooltip: false, viz: false, legend: false },
  lineStyle: undefined,
  fillBelowTo: undefined,
  axisWidth: undefined,
  axisSoftMin: undefined,
  axisSoftMax: undefined,
};
const CELLS = {
  align: 'auto',
  cellOptions: { type: 'auto' },
  inspect: false,
  filterable: undefined,
  width: undefined,
  minWidth: 50,
  hidden: undefined,
};

const NO_OPTIONS = {};
const TYPE_TO_OPTIONS = { timeseries: LINES, table: CELLS };
const TYPE_TO_COLOUR = { timeseries: 'palette-classic' };
const TYPE_TO_REGISTRY = new Map();

// Returns the options of a field that a type of panel has, with their defaults.
export function registryOf(type) {
  if (!TYPE_TO_REGISTRY.has(type)) {
    const own = TYPE_TO_OPTIONS[type] ?? NO_OPTIONS;
    const config = {
      standardOptions: { color: { defaultValue: { mode: TYPE_TO_COLOUR[type] ?? 'thresholds' } } },
      useCustomConfig: (builder) =>
        Object.entries(own).forEach(([path, value]) =>
          builder.addCustomEditor({ ...option(path, value), override: () => null, editor: () => null })
        ),
    };
    TYPE_TO_REGISTRY.set(type, createFieldConfigRegistry(config, type));
  }
  return TYPE_TO_REGISTRY.get(type);
}

// Returns the `fieldConfig` of a panel with the defaults of its type.
export function withDefaults(panel) {
  const defaults = structuredClone(panel.fieldConfig?.defaults ?? {});
  for (const item of registryOf(panel.type).list()) {
    if (item.defaultValue === undefined) {
      continue;
    }
    const holder = item.isCustom ? (defaults.custom ??= {}) : defaults;
    holder[item.path] ??= structuredClone(item.defaultValue);
  }
  return { defaults, overrides: panel.fieldConfig?.overrides ?? [] };
}
