// Gives Grafana's components the scrollbars that they import as the default of a package. That package is CommonJS, so
// for an importer that is a module, as Grafana's are, its default is the whole package.

export { Scrollbars as default, Scrollbars } from 'react-custom-scrollbars-2';
