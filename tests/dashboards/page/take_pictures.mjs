// Takes the pictures: `node take_pictures.mjs PLAN`, where PLAN is a file of JSON that draw_dashboards.py has written.
//
// The plan has `chromium` (the path of the browser), `scale` (pixels of the picture per pixel of the page) and `boards`:
// each with `payload`, the file that `drawBoard` gets, `picture`, the file to write, and `rows`, which maps the title of
// a row to the file of its own picture. It prints a line of JSON for each board, with the panels that show no data. The
// browser reads everything from this folder and asks no network.

import { readFile } from 'node:fs/promises';
import path from 'node:path';

import { build } from 'esbuild';
import { chromium } from 'playwright-core';

const HERE = import.meta.dirname;
const ICONS = path.join(HERE, 'node_modules/@grafana/ui/dist/public');
const FONTS = path.join(HERE, 'node_modules/@fontsource/inter/files');
const FONT_TO_FILE = {
  '/public/fonts/inter/Inter-Regular.woff2': 'inter-latin-400-normal.woff2',
  '/public/fonts/inter/Inter-Medium.woff2': 'inter-latin-500-normal.woff2',
};
const ORIGIN = 'http://boards.invalid';
const PAGE = `<!doctype html><html><head><meta charset="utf-8"><link rel="stylesheet" href="/board.css"></head>
<body><div id="styles"></div><div id="board"></div><script>window.__grafana_public_path__ = '/public/'</script>
<script src="/board.js"></script></body></html>`;
const ENDING_TO_TYPE = {
  '.html': 'text/html',
  '.js': 'text/javascript',
  '.css': 'text/css',
  '.svg': 'image/svg+xml',
  '.woff2': 'font/woff2',
};
const MARGIN = 100;
const DRAWING_MS = 20_000;

// Puts scrollbars.js between Grafana's components and the package of the scrollbars.
const SCROLLBARS = path.join(HERE, 'scrollbars.js');
const scrollbars = {
  name: 'scrollbars',
  setup: (made) =>
    made.onResolve({ filter: /^react-custom-scrollbars-2$/ }, ({ importer }) =>
      importer === SCROLLBARS ? undefined : { path: SCROLLBARS }
    ),
};

// Returns the script and the style of the page by their paths.
async function bundle() {
  const made = await build({
    entryPoints: [path.join(HERE, 'board.jsx')],
    bundle: true,
    write: false,
    outdir: '/',
    jsx: 'automatic',
    plugins: [scrollbars],
    define: { 'process.env.NODE_ENV': '"production"', global: 'window' },
    loader: { '.svg': 'dataurl', '.png': 'dataurl', '.ttf': 'empty' },
    logLevel: 'error',
  });
  return new Map(made.outputFiles.map((file) => [`/${path.basename(file.path)}`, file.text]));
}

// Returns the path of an icon or a font of Grafana.
function assetOf(pathname) {
  const font = FONT_TO_FILE[pathname];
  return font ? path.join(FONTS, font) : path.join(ICONS, path.normalize(pathname.slice('/public'.length)));
}

// Answers every request of the page from `files` and from Grafana's icons and fonts.
async function serve(page, files, missing) {
  await page.route('**/*', async (route) => {
    const { pathname } = new URL(route.request().url());
    const contentType = ENDING_TO_TYPE[path.extname(pathname)] ?? 'text/html';
    if (files.has(pathname)) {
      return route.fulfill({ body: files.get(pathname), contentType });
    }
    if (pathname.startsWith('/public/')) {
      const body = await readFile(assetOf(pathname)).catch(() => null);
      if (body !== null) {
        return route.fulfill({ body, contentType });
      }
    }
    missing.push(pathname);
    return route.fulfill({ status: 404, body: '' });
  });
}

// Runs in the page: says whether every panel with data has its canvas or its table, two frames ago. Grafana measures
// texts and sizes in the frames after the first.
async function isDrawn() {
  const panels = [...document.querySelectorAll('[data-panel][data-empty=false]')];
  const isThere = panels.every((panel) => panel.querySelector('canvas, [role=table]'));
  for (let frame = 0; isThere && frame < 2; frame++) {
    await new Promise(requestAnimationFrame);
  }
  return isThere;
}

async function draw(context, files, { payload, picture, rows }) {
  const page = await context.newPage();
  const errors = [];
  page.on('pageerror', (error) => errors.push(error.stack ?? String(error)));
  page.on('console', (message) => message.type() === 'error' && errors.push(message.text()));
  await serve(page, files, errors);
  const drawn = JSON.parse(await readFile(payload, 'utf8'));
  await page.setViewportSize({ width: drawn.width + MARGIN, height: 1000 });
  await page.goto(`${ORIGIN}/index.html`);
  await page.evaluate((each) => window.drawBoard(each), drawn);
  await page.waitForSelector('.board', { timeout: DRAWING_MS }).catch((error) => {
    throw new Error(`${picture} was not drawn: ${errors.join('\n') || error.message}`);
  });
  await page.waitForLoadState('networkidle');
  await page.waitForFunction(isDrawn, null, { timeout: DRAWING_MS });
  await page.locator('.board').screenshot({ path: picture, timeout: DRAWING_MS });
  for (const [title, file] of Object.entries(rows ?? {})) {
    await page.locator(`[data-row="${title}"]`).screenshot({ path: file, timeout: DRAWING_MS });
  }
  const panels = page.locator('[data-panel]');
  const shown = await panels.evaluateAll((all) => all.map(({ dataset }) => [dataset.panel, dataset.empty === 'true']));
  await page.close();
  const empty = shown.filter(([, isEmpty]) => isEmpty).map(([title]) => title);
  return { picture, panels: shown.length, empty, errors };
}

const plan = JSON.parse(await readFile(process.argv[2], 'utf8'));
const files = await bundle();
files.set('/index.html', PAGE);
const browser = await chromium.launch({ executablePath: plan.chromium });
try {
  const context = await browser.newContext({ deviceScaleFactor: plan.scale, timezoneId: 'UTC' });
  for (const board of plan.boards) {
    console.log(JSON.stringify(await draw(context, files, board)));
  }
} finally {
  await browser.close();
}
