// Starts the console: its tabs, its theme, the API key, and the state of the cluster in its head. It refreshes the tab
// that is shown, once per second, and nothing while the page is hidden.

import { clearCluster, refreshCluster } from "./cluster.js";
import { byId, keep, kept } from "./elements.js";
import { startPlayground, useModel } from "./playground.js";
import { clearRequests, isLive, refreshRequests, startRequests } from "./requests.js";
import { hasKey, read, useKey } from "./server.js";

const TABS = ["playground", "requests", "cluster"];
const REFRESH_MS = 1000;
const THEMES = ["system", "light", "dark"];
let shownTab = "playground";
/** Says that the model is known. It is asked for again when the cluster may have become another one. */
let hasModel = false;
let isAsking = false;

// ------------------------------------------------------------ tabs

function showTab(name, hasFocus = false) {
  shownTab = name;
  for (const each of TABS) {
    const tab = byId(`tab-${each}`);
    const isShown = each === name;
    tab.setAttribute("aria-selected", String(isShown));
    tab.tabIndex = isShown ? 0 : -1;
    byId(each).hidden = !isShown;
    if (isShown && hasFocus) tab.focus();
  }
  if (location.hash !== `#${name}`) history.replaceState(null, "", `#${name}`);
  refresh();
}

function startTabs() {
  for (const name of TABS) byId(`tab-${name}`).onclick = () => showTab(name);
  document.querySelector(".tabs").onkeydown = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const at = TABS.indexOf(shownTab);
    if (step) showTab(TABS[(at + step + TABS.length) % TABS.length], true);
    else if (event.key === "Home") showTab(TABS[0], true);
    else if (event.key === "End") showTab(TABS[TABS.length - 1], true);
  };
  addEventListener("hashchange", () => showTab(TABS.find((each) => location.hash === `#${each}`) ?? shownTab));
}

// ------------------------------------------------------------ theme

function useTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme").textContent = `Theme: ${theme}`;
  keep("localStorage", "weft-theme", theme);
}

function startTheme() {
  let theme = kept("localStorage", "weft-theme");
  if (!THEMES.includes(theme)) theme = "system";
  useTheme(theme);
  byId("theme").onclick = () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    useTheme(theme);
  };
}

// ------------------------------------------------------------ key

function startKey() {
  const dialog = byId("key-dialog");
  byId("key").onclick = () => askForKey("The key goes with every request of this page. Leave it empty to use none.");
  byId("key-cancel").onclick = () => dialog.close();
  byId("key-form").onsubmit = (event) => {
    event.preventDefault();
    useKey(byId("key-field").value);
    dialog.close();
    forgetModel();
    clearRequests();
    clearCluster();
    refresh();
  };
}

function askForKey(why) {
  if (byId("key-dialog").open) return;
  byId("key-why").textContent = why;
  byId("key-field").value = "";
  byId("key-dialog").showModal();
  byId("key-field").focus();
}

// ------------------------------------------------------------ what the cluster says

function forgetModel() {
  hasModel = false;
}

/** Returns what the head says of the cluster, as the kind of its dot and a text. */
async function readState() {
  let ready;
  try {
    ready = await read("health/ready");
  } catch (error) {
    if (error.status !== 503 || !error.body?.status) throw error;
    ready = error.body; // A cluster that is not ready says so with status 503.
  }
  if (!hasModel) {
    const { data } = await read("v1/models");
    useModel(data[0]);
    byId("state").dataset.model = data[0].id;
    hasModel = true;
  }
  const model = byId("state").dataset.model;
  const counts = `${ready.num_encoders} encoder${ready.num_encoders === 1 ? "" : "s"}, ${ready.num_workers} worker${ready.num_workers === 1 ? "" : "s"}`;
  return [ready.status === "ready" ? "good" : "warn", `${model}: ${ready.status}, ${counts}`];
}

function refused(error) {
  if (error.status === 401 && !isAsking) {
    isAsking = true; // Once; then the button in the head is there.
    askForKey(
      hasKey()
        ? "The cluster does not know this key."
        : "This cluster asks for a key. That of an operator shows requests and members too.",
    );
  }
  if (error.status === 401) setState("warn", hasKey() ? "the key is not known" : "a key is needed");
  else if (error.status === 403) setState("warn", "this needs an operator's key");
  else setState("bad", error.message);
}

function setState(kind, text) {
  document.querySelector("#state .dot").className = `dot ${kind}`;
  if (byId("state-text").textContent !== text) byId("state-text").textContent = text;
}

let isRefreshing = false;

async function refresh() {
  if (isRefreshing || document.hidden) return;
  isRefreshing = true;
  try {
    const state = await readState();
    if (shownTab === "requests" && isLive()) await refreshRequests();
    if (shownTab === "cluster") await refreshCluster();
    setState(...state); // The head says one thing in each round, so a screen reader does not speak twice a second.
  } catch (error) {
    if (error.status === 0 || error.status >= 500) forgetModel();
    refused(error);
  } finally {
    isRefreshing = false;
  }
}

startTheme();
startTabs();
startKey();
startPlayground(forgetModel);
startRequests(refused);
showTab(TABS.find((each) => location.hash === `#${each}`) ?? "playground");
setInterval(refresh, REFRESH_MS);
document.addEventListener("visibilitychange", () => {
  forgetModel();
  refresh();
});
