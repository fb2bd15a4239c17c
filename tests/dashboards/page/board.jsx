// Draws a dashboard as Grafana lays it out: a head with the variables, rows, and panels on a grid of 24 columns.
//
// `window.drawBoard(payload)` returns when the drawing has begun. The payload has `board` (the dashboard), `answers`
// (those of Prometheus by the expression of a query), `fromS`, `untilS`, `stepS`, `width` in pixels,
// `mode` (`dark` or `light`) and `note`, which the head shows.

import 'uplot/dist/uPlot.min.css';
import './board.css';

import { createTheme, dateTime, ThemeContext } from '@grafana/data';
import { Badge, GlobalStyles, Icon, InlineLabel, Text } from '@grafana/ui';
import { createRoot } from 'react-dom/client';

import { framesOf } from './frames.js';
import { isDrawn, PanelPicture } from './panels.jsx';

const COLUMNS = 24;
const CELL_HEIGHT = 30;
const GAP = 8;
const PADDING = 16;

function Head({ board, context }) {
  const { from, to } = context.timeRange;
  return (
    <div className="board-head">
      <Text element="h1" variant="h4">
        {board.title}
      </Text>
      <div className="board-variables">
        {board.templating.list.map((variable) => (
          <div key={variable.name} className="board-variable">
            <InlineLabel width="auto">{variable.label}</InlineLabel>
            <span>{variable.type === 'datasource' ? 'Prometheus' : (variable.current?.text ?? '')}</span>
          </div>
        ))}
        {board.links.map((link) => (
          <div key={link.title} className="board-variable">
            <Icon name="bars" />
            <span>{link.title}</span>
          </div>
        ))}
        {context.note && <Badge color="orange" text={context.note} />}
        <span className="board-range">
          <Icon name="clock-nine" /> {from.utc().format('YYYY-MM-DD HH:mm:ss')} to {to.utc().format('HH:mm:ss')} UTC
        </span>
      </div>
    </div>
  );
}

function RowHead({ title }) {
  return (
    <div className="board-row-head">
      <Icon name="angle-down" />
      <Text element="h2" variant="h6">
        {title}
      </Text>
    </div>
  );
}

// Divides the panels into rows, each with the place of its first line and the number of its lines.
function rowsOf(panels) {
  const rows = [];
  for (const panel of panels) {
    const { y, h } = panel.gridPos;
    if (panel.type === 'row' || !rows.length) {
      rows.push({ title: panel.type === 'row' ? panel.title : '', from: y, until: y, panels: [] });
    }
    const row = rows.at(-1);
    row.panels.push(panel);
    row.until = Math.max(row.until, y + h);
  }
  return rows;
}

function Row({ row, drawn, context, width }) {
  const column = (width + GAP) / COLUMNS;
  const line = CELL_HEIGHT + GAP;
  const place = ({ x, y, w, h }) => ({
    left: x * column,
    top: (y - row.from) * line,
    width: w * column - GAP,
    height: h * line - GAP,
  });
  return (
    <div className="board-row" data-row={row.title} style={{ height: (row.until - row.from) * line }}>
      {row.panels.map((panel) => {
        const own = place(panel.gridPos);
        return (
          <div key={panel.id} className="board-place" style={own}>
            {panel.type === 'row' ? (
              <RowHead title={panel.title} />
            ) : (
              <PanelPicture
                panel={panel}
                frames={drawn.get(panel.id)}
                context={context}
                width={own.width}
                height={own.height}
              />
            )}
          </div>
        );
      })}
    </div>
  );
}

function contextOf({ board, fromS, untilS, stepS, mode, note }) {
  const names = new Map(board.templating.list.map((each) => [each.name, String(each.current?.text ?? '')]));
  const [from, to] = [dateTime(fromS * 1000).utc(), dateTime(untilS * 1000).utc()];
  return {
    theme: createTheme({ colors: { mode } }),
    stepS,
    note,
    timeRange: { from, to, raw: { from, to } },
    replaceVariables: (text) =>
      text.replace(/\$\{?(\w+)(?::\w+)?\}?/g, (whole, name) => names.get(name) ?? whole),
  };
}

window.drawBoard = async (payload) => {
  const { board, answers, width } = payload;
  const context = contextOf(payload);
  const panels = board.panels.filter((panel) => panel.type !== 'row');
  const refused = panels.filter((panel) => !isDrawn(panel.type));
  if (refused.length) {
    throw new Error(`no component draws panels of the type ${refused[0].type} (${refused[0].title})`);
  }
  const drawn = new Map();
  for (const panel of panels) {
    drawn.set(panel.id, await framesOf(panel, answers, context));
  }
  document.body.style.background = context.theme.colors.background.canvas;
  // Axes measure their labels when they are drawn, so the fonts must be there before.
  createRoot(document.getElementById('styles')).render(
    <ThemeContext.Provider value={context.theme}>
      <GlobalStyles />
    </ThemeContext.Provider>
  );
  let faces = [];
  while (faces.length < 2) {
    await new Promise(requestAnimationFrame);
    faces = [...document.fonts].filter((face) => face.family.replaceAll('"', '') === 'Inter');
  }
  await Promise.all(faces.map((face) => face.load()));
  createRoot(document.getElementById('board')).render(
    <ThemeContext.Provider value={context.theme}>
      <div className="board" style={{ width: width + 2 * PADDING }}>
        <Head board={board} context={context} />
        {rowsOf(board.panels).map((row) => (
          <Row key={row.title} row={row} drawn={drawn} context={context} width={width} />
        ))}
      </div>
    </ThemeContext.Provider>
  );
};
