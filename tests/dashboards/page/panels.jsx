// Draws one panel with Grafana's own components: its frame, title and description, and inside it the time series, the
// number or the table. A type that stands in no package of Grafana is refused, so that no picture shows something else
// than Grafana would.

import { getFieldDisplayValues } from '@grafana/data';
import { BigValue, Icon, PanelChrome, Table, TimeSeries, VizRepeater } from '@grafana/ui';

import { withDefaults } from './field_defaults.js';

function NoData({ text }) {
  return <div className="board-no-data">{text ?? 'No data'}</div>;
}

function Lines({ panel, frames, context, width, height }) {
  if (!frames.length) {
    return <NoData text={panel.fieldConfig.defaults.noValue} />;
  }
  return (
    <TimeSeries
      frames={frames}
      structureRev={1}
      width={width}
      height={height}
      timeRange={context.timeRange}
      timeZone="utc"
      legend={panel.options.legend}
      options={panel.options}
    />
  );
}

function Numbers({ panel, frames, context, width, height }) {
  const { options } = panel;
  const values = getFieldDisplayValues({
    fieldConfig: withDefaults(panel),
    reduceOptions: options.reduceOptions,
    replaceVariables: context.replaceVariables,
    theme: context.theme,
    data: frames,
    sparkline: options.graphMode !== 'none',
    timeZone: 'utc',
  });
  const one = (value, ownWidth, ownHeight, count) => (
    <BigValue
      value={value.display}
      sparkline={value.sparkline && { ...value.sparkline, timeRange: context.timeRange }}
      colorMode={options.colorMode}
      graphMode={options.graphMode}
      justifyMode={options.justifyMode}
      textMode={options.textMode}
      wideLayout={options.wideLayout}
      count={count}
      width={ownWidth}
      height={ownHeight}
      theme={context.theme}
    />
  );
  return (
    <VizRepeater
      getValues={() => values}
      renderValue={({ value, width: ownWidth, height: ownHeight, count }) => one(value, ownWidth, ownHeight, count)}
      width={width}
      height={height}
      source={frames}
      renderCounter={1}
      orientation={options.orientation}
    />
  );
}

function Cells({ frames, context, width, height }) {
  if (!frames.length) {
    return <NoData />;
  }
  return <Table data={frames[0]} width={width} height={height} timeRange={context.timeRange} />;
}

function Links({ panel }) {
  return (
    <PanelChrome.TitleItem title={panel.links[0].title}>
      <Icon name={panel.links.length > 1 ? 'link' : 'external-link-alt'} />
    </PanelChrome.TitleItem>
  );
}

const TYPE_TO_DRAWING = { timeseries: Lines, stat: Numbers, table: Cells };

// Says whether a panel of this type can be drawn.
export const isDrawn = (type) => type in TYPE_TO_DRAWING;

export function PanelPicture({ panel, frames, context, width, height }) {
  const Drawing = TYPE_TO_DRAWING[panel.type];
  const isEmpty = !frames.some((frame) => frame.length > 0);
  return (
    <div data-panel={panel.title} data-empty={isEmpty}>
      <PanelChrome
        title={context.replaceVariables(panel.title)}
        description={panel.description}
        titleItems={panel.links?.length ? <Links panel={panel} /> : undefined}
        width={width}
        height={height}
        padding={panel.type === 'table' ? 'none' : 'md'}
      >
        {(innerWidth, innerHeight) => (
          <Drawing panel={panel} frames={frames} context={context} width={innerWidth} height={innerHeight} />
        )}
      </PanelChrome>
    </div>
  );
}
